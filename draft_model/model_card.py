"""README.md of an exported draft: what it is, how the engine serves it, what was measured and how it was made."""

import json
from pathlib import Path
from typing import Any

from draft_model.config import DraftConfig
from draft_model.engines import ID_OFFSET, Engine


def model_card(
    name: str,
    config: DraftConfig,
    engine: Engine,
    target: str,
    *,
    source: Path,
    record: dict[str, Any] | None,
    training: dict[str, Any] | None,
) -> str:
    """`record` is a run's run.json, `training` the training.json beside the weights; sections of the README of `source`
    are kept.
    """
    ids = [tap + ID_OFFSET[engine.layer_ids] for tap in config.taps]
    switches = [s for s in ("fc_norm", "norm_output", "norm_before_residual", "attention_bias") if getattr(config, s)]
    vocabulary = f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens" if config.pruned else "full vocabulary"
    lines = [
        f"# {name}",
        "",
        f"EAGLE-3 draft for {target}, written for {engine.name}.",
        "",
        "| | |",
        "|---|---|",
        f"| hidden, MLP | {config.hidden_size}, {config.intermediate_size} |",
        f"| heads, KV heads, head size | {config.num_heads}, {config.num_kv_heads}, {config.head_dim} |",
        f"| vocabulary | {vocabulary} |",
        f"| context | {config.max_position:,} |",
        f"| switches on | {', '.join(switches) or 'none'} |",
        f"| taps | the residual stream entering layers {', '.join(map(str, config.taps))} |",
        f"| layer ids in config.json | {ids} ({_meaning(engine)}) |",
        "",
    ]
    if engine.serve:
        lines += ["## Serve", "", "    " + engine.serve.format(target=target, draft=name), ""]
    if engine.target_embedding:
        lines += [f"{engine.name} serves with the target's embedding in place of the one stored here.", ""]
    lines += _acceptance(record) or _section(source, "Acceptance")
    lines += _recipe(record, training)
    lines += _section(source, "Recipe")
    return "\n".join(lines).rstrip() + "\n"


def _meaning(engine: Engine) -> str:
    return "the layer it enters" if engine.layer_ids == "entering" else "the layer it leaves"


def _acceptance(record: dict[str, Any] | None) -> list[str]:
    best = (record or {}).get("best")
    if not best:
        return []
    chain = best.get("chain", "?")
    lines = ["## Acceptance", "", f"Held-out prompts ({best.get('prompts', '?')}), chain of {chain}.", ""]
    lines += ["| | AL |", "|---|---|", f"| greedy | {best['al']:.2f} |"]
    if best.get("al_sampled") is not None:
        lines.append(f"| T = 1 | {best['al_sampled']:.2f} |")
    if best.get("per_position"):
        lines += ["", "Per position, greedy: " + ", ".join(f"{value:.3f}" for value in best["per_position"]) + "."]
    return [*lines, ""]


def _recipe(record: dict[str, Any] | None, training: dict[str, Any] | None) -> list[str]:
    lines: list[str] = []
    if record is not None:
        done = f"Run {record['name']}: step {record['step']} of {record['total_steps']}."
        lines += ["## Training run", "", done, "", *_block(record["config"])]
    if training is not None:
        lines += ["## Training record", "", *_block(training)]
    return lines


def _block(values: dict[str, Any]) -> list[str]:
    return ["```json", json.dumps(values, indent=1), "```", ""]


def _section(source: Path, title: str) -> list[str]:
    """A section of the source's own README, heading included."""
    path = source / "README.md"
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    if f"## {title}" not in lines:
        return []
    start = lines.index(f"## {title}")
    end = next((i for i in range(start + 1, len(lines)) if lines[i].startswith("## ")), len(lines))
    return [*lines[start:end], ""] if lines[end - 1].strip() else lines[start:end]
