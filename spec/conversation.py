"""A row of a data file as training sees it: its text with the trained tokens coloured, and its training rows."""

import itertools
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from target_model.resolve import resolve_target
from target_model.tokenizer import Tokenizer, load_tokenizer
from train.config import DataConfig
from train.data import load_rows, read_document, valid_steps
from train.initialise import coverage

TRAINED = "bold green"


@dataclass(frozen=True)
class Settings:
    """`row` counts the rows of the data from 1; `table` adds the (feature, input, label) rows of TTT step 0."""

    data: DataConfig
    target: str
    row: int = 1
    table: bool = False


def show(settings: Settings, console: Console) -> None:
    """Prints one row, then what a training run would keep and drop of all rows. UserError as in training."""
    tokenizer = load_tokenizer(resolve_target(settings.target).path)
    document, reason = read_document(settings.data, tokenizer, settings.row)
    if document is None:
        console.print(f"row {settings.row} is left out: {reason}", highlight=False)
    else:
        ids, spans = document.token_ids, document.spans
        console.print(coloured(tokenizer, ids, spans), soft_wrap=True)
        counted = valid_steps(np.ones_like(spans), spans, 1)
        console.print(
            f"\nrow {settings.row}: {len(ids)} tokens, {int((spans > 0).sum())} supervised (coloured), "
            f"{int(counted.sum())} training rows at TTT step 0",
            highlight=False,
        )
        if settings.table:
            console.print(rows_table(tokenizer, ids, counted))
    console.print(load_rows(settings.data, tokenizer, 0).summary(), highlight=False, soft_wrap=True)


def show_coverage(data: DataConfig, target: str, console: Console) -> None:
    """Prints how much of the supervised text draft vocabularies of several sizes hold."""
    resolved = resolve_target(target)
    rows = load_rows(data, load_tokenizer(resolved.path), 0)
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("draft_vocab_size", "of supervised tokens"):
        table.add_column(name, justify="right")
    for size, share in coverage(rows, resolved.config.vocab_size):
        table.add_row(f"{size:,}", f"{100 * share:.2f} %")
    console.print(table)
    console.print(rows.summary(), highlight=False, soft_wrap=True)


def coloured(tokenizer: Tokenizer, ids: np.ndarray, spans: np.ndarray) -> Text:
    """The text; neighbouring tokens are decoded together, as a character may lie across several."""
    text = Text()
    start = 0
    for trained, group in itertools.groupby(spans > 0):
        end = start + len(list(group))
        text.append(tokenizer.decode(ids[start:end].tolist()), style=TRAINED if trained else "dim")
        start = end
    return text


def rows_table(tokenizer: Tokenizer, ids: np.ndarray, counted: np.ndarray) -> Table:
    """Row p: the feature of position p, the token p + 1 that is read, the token p + 2 that is predicted."""
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("row", "feature of", "input", "label"):
        table.add_column(name, justify="right" if name == "row" else "left")

    def shown(position: int) -> Text:
        return Text(f"{position} {tokenizer.decode([int(ids[position])])!r}")

    for p in np.flatnonzero(counted):
        table.add_row(str(p), shown(p), shown(p + 1), shown(p + 2))
    return table
