"""How long requests wait before they first run."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from serve.load import EngineOptions, load_engine
from serve.request import Request, SamplingParams
from serve.server import make_service
from tests.serve.http_client import client


def test_the_wait_ends_when_a_request_first_runs():
    engine, _, _ = load_engine(EngineOptions("m3-tiny", None, context=512, max_running=1))
    for name in ("first", "second"):
        engine.add(Request(name, [5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True)))
    waits: dict[str, set[float]] = {"first": set(), "second": set()}
    while engine.has_work():
        for update in engine.step():
            waits[update.id].add(update.queue_seconds)
    (first,), (second,) = waits["first"], waits["second"]  # one value each, whatever the step
    assert 0 <= first < second


def test_the_histogram_counts_requests_that_ran():
    engine, tokenizer, description = load_engine(EngineOptions("m3-tiny", None, context=512, max_running=1))

    async def run() -> str:
        async with client(make_service(engine, tokenizer, description)) as http:
            for _ in range(3):
                assert (await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})).status_code == 200
            return (await http.get("/metrics")).text

    families = {family.name: family for family in text_string_to_metric_families(asyncio.run(run()))}
    values = {sample.name: sample.value for sample in families["spec_request_queue_time_seconds"].samples}
    assert values["spec_request_queue_time_seconds_count"] == 3
    assert 0 <= values["spec_request_queue_time_seconds_sum"]
