"""configs/grafana.json shows what /metrics has."""

import asyncio
import itertools
import json
import re
from importlib.resources import files

from prometheus_client.parser import text_string_to_metric_families

from tests.serve.fake_engine import saying, service
from tests.serve.http_client import client

BOARD = json.loads((files("configs") / "grafana.json").read_text())
EXPRESSIONS = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]


def exposed() -> dict[str, set[str]]:
    """Every sample that a server has after a request, with its labels."""

    async def run() -> str:
        async with client(service(saying("Some words of an answer"))) as http:
            assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 200
            return (await http.get("/metrics")).text

    samples: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(asyncio.run(run())):
        if family.type == "histogram":  # one that has seen nothing yet has no samples
            samples[f"{family.name}_bucket"] = {"le", "model_name"}
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


def test_every_metric_of_the_dashboard_exists():
    samples = exposed()
    queries = [*EXPRESSIONS, *(entry["query"] for entry in BOARD["templating"]["list"] if entry["type"] == "query")]
    named = {name for query in queries for name in re.findall(r"\bspec_\w+", query)}
    assert len(named) > 15
    assert named - samples.keys() == set()


def test_labels_of_the_dashboard_exist():
    samples = exposed()
    for expression in EXPRESSIONS:
        name = re.findall(r"\bspec_\w+", expression)[0]
        labels = set(re.findall(r"\bby \((\w+)\)", expression)) | set(re.findall(r"[{,](\w+)=~", expression))
        assert labels and labels <= samples[name], expression
    legends = {
        label for p in BOARD["panels"] for t in p["targets"] for label in re.findall(r"{{(\w+)}}", t["legendFormat"])
    }
    assert legends == {"position", "finished_reason"}


def test_panels_stand_beside_each_other():
    assert (
        len({panel["id"] for panel in BOARD["panels"]})
        == len({p["title"] for p in BOARD["panels"]})
        == len(BOARD["panels"])
    )
    for one, other in itertools.combinations([panel["gridPos"] for panel in BOARD["panels"]], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart_x or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
    for expression in EXPRESSIONS:
        assert all(expression.count(pair[0]) == expression.count(pair[1]) for pair in ("()", "[]", "{}"))
