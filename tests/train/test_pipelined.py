"""Features dealt out by a target in stages equal those of the whole target, for every rank, micro batch and layout."""

import json

import numpy as np
import pytest
import torch
import torch.multiprocessing

from target_model.checkpoint import load_target
from target_model.errors import UserError
from target_model.resolve import resolve_target
from target_model.tokenizer import load_tokenizer
from train.config import DataConfig, FeatureConfig, parse_config, parse_section
from train.data import load_rows
from train.features import OnlineCapture
from train.pipelined import PipelinedCapture, load_stage

TAPS, STEPS = (2, 4, 5), 3
# [ranks][micro batches] of an optimizer step.
PARTS = [[np.array([0, 3]), np.array([1])], [np.array([2, 4]), np.array([5])]]


def rows(path: str):
    config = DataConfig(path=path, sequence_length=48, packing=True)
    return load_rows(config, load_tokenizer(resolve_target("m3-tiny").path), 0)


def fields(features) -> dict:
    return {name: value for name, value in vars(features).items() if isinstance(value, torch.Tensor)}


def stage_process(rank: int, path: str, address: str, output: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    stage = load_stage(resolve_target("m3-tiny"), 2, rank, 2, dtype=torch.float32, device=torch.device("cpu"))
    capture = PipelinedCapture(stage, rows(path), TAPS, STEPS, stages=2, rank=rank, world=2, capture_rows=2)
    found = {"dealt": [fields(features) for features in capture.micro_batches(PARTS, rank)]}
    found["same"] = [fields(capture.features(np.array([4, 0, 5])))]
    torch.save(found, f"{output}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_every_rank_gets_its_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"x{i} = [{i}] * {i}\n" * (i % 5 + 1)}) + "\n" for i in range(24)))
    arguments = (str(path), f"file://{tmp_path}/rendezvous", str(tmp_path))
    torch.multiprocessing.spawn(stage_process, arguments, nprocs=2)
    loaded = rows(str(path))
    assert loaded.documents.max() > 1 and len(loaded) >= 6
    whole = OnlineCapture(load_target("m3-tiny"), loaded, TAPS, STEPS, capture_rows=2)
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        expected = [fields(features) for features in whole.micro_batches(PARTS, rank)]
        assert len(found["dealt"]) == len(expected) == 2
        expected.append(fields(whole.features(np.array([4, 0, 5]))))
        for ours, theirs in zip(found["dealt"] + found["same"], expected, strict=True):
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=1e-6, msg=name)


def test_what_cannot_be_spread_is_refused():
    target, place = resolve_target("m3-tiny"), {"dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.raises(UserError, match=r"features\.stages=2 does not divide the 3 processes"):
        load_stage(target, 2, 0, 3, **place)
    with pytest.raises(UserError, match=r"features\.stages=9, but target m3-tiny has 8 layers"):
        load_stage(target, 9, 0, 9, **place)
    with pytest.raises(UserError, match="no cache and no store"):
        parse_section(FeatureConfig, {"stages": 2, "cache": True}, "features")
    values = {"name": "x", "data": {"path": "x"}, "schedule": {"steps": 1}, "features": {"stages": 2}}
    with pytest.raises(UserError, match=r"features\.stages=2 leaves no process the whole target to serve"):
        parse_config(values)
    assert parse_config(values | {"eval": {"judge": "none"}}).features.stages == 2
    with pytest.raises(UserError, match="judge=replay and answers need each other"):
        parse_config(values | {"eval": {"judge": "replay"}})
