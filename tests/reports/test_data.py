"""DATA: what is trained is not what the server will ask, or labels and masks are shifted against each other.

Reports R2 (mask not shifted with the labels) and R15 (template switches, reasoning without loss). Also tried, of the
same kind: answers of 1 to 9 tokens, packed rows whose answers touch, second turns, marker texts in an answer. The rule
itself is proven by brute force in tests/train/test_data.py, and every thinking mode against the server's prompts, with
tools, in tests/target_model/test_chat_template.py.
"""

import json

import numpy as np
import pytest
import torch

from target_model.resolve import resolve_target
from target_model.tokenizer import load_tokenizer
from tests.draft_model.drafts import random_draft
from tests.train.batches import random_features
from train.config import DataConfig
from train.data import load_rows, valid_steps
from train.loss import LossSettings, Teacher, count_rows, step_weights, ttt_loss
from train.ttt import unroll, valid_rows

STEPS = 3


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_target("m3-tiny").path)


def labels_that_matter(documents: list[int], spans: list[int]) -> set[tuple[int, int]]:
    """(row p, label position) at step 0, found from outside: which states' gradient and which teacher rows count."""
    draft = random_draft()
    features = random_features(draft.config, [documents], [spans], STEPS)
    rows = valid_rows(features.valid_steps, STEPS)
    weights = step_weights(count_rows(features.valid_steps, STEPS), 0.8)
    teacher, head = Teacher(torch.randn(300, 64), None), draft.lm_head.weight

    def loss(final_state):
        states = unroll(draft, features, rows)
        return ttt_loss(states, rows, head, final_state, features.valid_steps, weights, teacher, LossSettings())

    base, sums = loss(features.final_state)
    counted = set(rows[0].tolist())
    assert sums.rows[0] == len(counted)
    changed = set()
    for position in range(len(documents)):
        other = features.final_state.clone()
        other[0, position] += 1
        if loss(other)[0] != base:
            changed.add(position + 1)  # the teacher at a position tells the distribution of the token behind it
    assert changed == {row + 2 for row in counted}
    return {(row, row + 2) for row in counted}


@pytest.mark.parametrize("answer", [1, 2, 5, 9])
def test_r2_loss_depends_on_exactly_the_labels_of_the_answer(answer):
    """s: first answer token, e: end of turn. Row s - 1 counts, e is a label, and nothing behind e is; in both turns."""
    turn = [0] * 4 + [1] * (answer + 1)
    spans = turn + [2 * mark for mark in turn] + [0] * 3
    found = labels_that_matter([1] * len(spans), spans)
    expected = set()
    for first in (4, len(turn) + 4):
        end = first + answer
        expected |= {(row, row + 2) for row in range(first - 1, end - 1)}
        assert (first - 1, first + 1) in found and any(label == end for _, label in found)
    assert found == expected


def test_r2_packed_rows():
    """Two documents whose answers touch: no row reaches from one into the other."""
    found = labels_that_matter([1] * 6 + [2] * 6, [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2])
    assert found == {(1, 3), (2, 4), (3, 5), (6, 8), (7, 9), (8, 10), (9, 11)}


CONVERSATIONS = {
    "plain": [("user", "ab", None), ("assistant", "cdef", None)],
    "three turns": [("user", "a", None), ("assistant", "b", None)] * 3,
    "reasoning": [("user", "2 + 2?", None), ("assistant", "4", "two and two")],
    "marker in the answer": [("user", "say it", None), ("assistant", "]~b]ai </mm:think> [e~[", None)],
}


@pytest.mark.parametrize("mode", ["auto", "enabled", "disabled", "adaptive"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_r15_files_become_the_servers_prompts(tmp_path, tokenizer, name, mode):
    messages = [
        {"role": role, "content": text} | ({"reasoning_content": reasoning} if reasoning else {})
        for role, text, reasoning in CONVERSATIONS[name]
    ]
    path = tmp_path / "rows.jsonl"
    # A second row that every mode accepts is not there to be mixed up: refusals are counted, not hidden.
    path.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"text": "always kept"}) + "\n")
    rows = load_rows(DataConfig(path=str(path), thinking_mode=mode, sequence_length=256), tokenizer, 0)
    thinks = name == "reasoning"
    if (mode == "enabled" and not thinks) or (mode == "disabled" and thinks):
        assert sum("that the chat format refuses" in reason for reason in rows.dropped) == 1 and len(rows) == 1
        return
    row = next(i for i in range(2) if rows.spans[i, 0] == 0)
    ids, spans = rows.token_ids[row], rows.spans[row]
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert spans.max() == len(turns)
    served_mode = mode if mode != "auto" else "enabled" if thinks else "disabled"
    for number, turn in enumerate(turns, 1):
        start, *_, end = np.flatnonzero(spans == number)
        assert ids[:start].tolist() == tokenizer.render_chat(messages[:turn], thinking_mode=served_mode)
        text = tokenizer.decode(ids[start:end].tolist())
        assert text.endswith(messages[turn]["content"]) and ids[end] in tokenizer.eos_ids
        assert not thinks or messages[turn]["reasoning_content"] in text
        assert valid_steps(rows.documents[row], spans, 1)[start - 1] == 1
