"""The cases of `spec bench kernels` beside MSA: experts, dense attention, row kernels, training loss, sampling,
commit."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch

from spec.bench.kernel_timing import Machine, Row, Timer
from spec.bench.msa_cases import (
    DIM,
    HEADS,
    KV_HEADS,
    PAGE,
    SCALE,
    decode_batch,
    prefill_batch,
    random,
    tree_batch,
)
from target_model.kernels import (
    commit_rows,
    linear_kl,
    moe,
    norm_rope,
    norms,
    packed_products,
    packed_products_ref,
    paged_attention,
    sample_tokens,
    top_rows,
)
from target_model.quantised import QuantisedWeight
from target_model.quantised_formats import MXFP4, MXFP8, NVFP4, Format

HIDDEN, WIDTH, EXPERTS, PER_TOKEN, VOCAB = 6144, 3072, 128, 4, 200_064
ACTIVATION = (1.702, 7.0, 1.0)
FORMS = {"MXFP8": MXFP8, "MXFP4": MXFP4, "NVFP4": NVFP4}


def expert_weights(form: str, *leading: int) -> tuple[torch.Tensor | QuantisedWeight, torch.Tensor | QuantisedWeight]:
    """Random w13 and w2 of one layer; `leading`: the number of experts, or nothing for a dense MLP."""
    shapes = (*leading, 2 * WIDTH, HIDDEN), (*leading, HIDDEN, WIDTH)
    make = random if form == "bf16" else partial(packed_weight, FORMS[form])
    return make(*shapes[0]), make(*shapes[1])


def packed_weight(form: Format, *shape: int) -> QuantisedWeight:
    """Random codes, and scales that make numbers of common size of them."""
    weight = QuantisedWeight(shape, form).to_empty(device="cuda")
    weight.values.view(torch.uint8).random_(0, 256)
    if form.tensor_scale:
        weight.scale.view(torch.uint8).fill_(0x38)  # 1.0 in e4m3
        weight.tensor_scale.fill_(2.0**-9)
    else:
        weight.scale.random_(115, 120)
    return weight


def bytes_a_number(form: str) -> float:
    """Bytes that a weight takes for each of its numbers, scales included."""
    return 2.0 if form == "bf16" else FORMS[form].bytes((1 << 20, 1 << 10)) / (1 << 30)


def expert_rows(timer: Timer, machine: Machine, wanted: Callable[[str], bool]) -> Iterator[Row]:
    """Router and experts of one layer, routing drawn independently for each token."""
    gate, bias = torch.randn(EXPERTS, HIDDEN, device="cuda") * 0.01, torch.zeros(EXPERTS, device="cuda")
    for form in ("bf16", *FORMS):
        counts = [rows for rows in (1, 4, 16, 64, 1024) if wanted(f"experts {form} {rows}")]
        weights = expert_weights(form, EXPERTS) if counts else ()
        for count in counts:
            x = random(count, HIDDEN)
            shares, chosen = moe.route(x, gate, bias, PER_TOKEN, 2.0)

            def route(x: torch.Tensor = x) -> object:
                return moe.route(x, gate, bias, PER_TOKEN, 2.0)

            def experts(arguments: tuple = (x, *weights, shares, chosen, *ACTIVATION)) -> object:
                return moe.grouped_experts(*arguments)

            repeats = 30 if count < 1024 else 10
            parts = {"router": timer(route, graph=True), "experts": timer(experts, graph=True, repeats=repeats)}
            moved = chosen.unique().numel() * 3 * WIDTH * HIDDEN * bytes_a_number(form)
            operations = 6.0 * WIDTH * HIDDEN * chosen.numel()
            floor = machine.floor(moved, operations)
            yield Row(f"experts {form} {count}", parts["experts"], floor, moved, operations, parts, None, None)
        del weights
        torch.cuda.empty_cache()


def packed_rows(timer: Timer, machine: Machine, wanted: Callable[[str], bool]) -> Iterator[Row]:
    """A dense MLP as wide as an expert, with packed weights; beside it the same in bf16 with PyTorch."""
    for form, count in product(FORMS, (1, 16, 256, 4096)):
        name = f"MLP {form} {count}"
        if not wanted(name):
            continue
        x = random(count, HIDDEN)
        weights, plain = expert_weights(form), expert_weights("bf16")
        parts = {
            "packed": timer(lambda x=x, w=weights: packed_products.mlp(x, *w, *ACTIVATION), graph=True),
            "bf16": timer(lambda x=x, w=plain: packed_products_ref.mlp(x, *w, *ACTIVATION), graph=True),
        }
        moved = 3 * WIDTH * HIDDEN * bytes_a_number(form)
        operations = 6.0 * WIDTH * HIDDEN * count
        yield Row(name, parts["packed"], machine.floor(moved, operations), moved, operations, parts, None, None)


def dense_rows(timer: Timer, machine: Machine, wanted: Callable[[str], bool]) -> list[Row]:
    """Dense paged attention of one layer."""
    cases = {
        "dense decode B1 32k": (lambda: decode_batch(1, 32768), 39.9),
        "dense decode B16 32k": (lambda: decode_batch(16, 32768), 246),
        "dense tree B1x64 32k": (lambda: tree_batch(1, 64, 32768), 232),
        "dense tree B8x16 32k": (lambda: tree_batch(8, 16, 32768), 435),
        "dense prefill 8k": (lambda: prefill_batch(8192), 1763),
    }
    rows = []
    for name, (make, public) in cases.items():
        if not wanted(name):
            continue
        batch = make()
        pages = batch.block_table.numel() + 1
        k, v, q = (
            random(pages, PAGE, KV_HEADS, DIM),
            random(pages, PAGE, KV_HEADS, DIM),
            random(batch.num_rows, HEADS, DIM),
        )

        def attend(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, batch=batch) -> object:
            return paged_attention.paged_attention(q, k, v, batch, SCALE)

        time = timer(attend, graph=True, repeats=10)
        ends = batch.positions.double() + 1
        keys = float(batch.committed.double().sum()) + (batch.num_rows if batch.ancestors is None else 0)
        moved = keys * KV_HEADS * DIM * 4 + 4.0 * q.numel()
        operations = 4.0 * DIM * HEADS * float(ends.sum())
        rows.append(Row(name, time, machine.floor(moved, operations), moved, operations, {}, None, public))
    return rows


def row_kernel_rows(timer: Timer, machine: Machine, wanted: Callable[[str], bool]) -> list[Row]:
    """Norm + RoPE + cache write, the fused norms, commit: all memory-bound."""
    rows = []

    def add(name: str, run: Callable[[], object], moved: float) -> None:
        if wanted(name):
            rows.append(Row(name, timer(run, graph=True), machine.floor(moved, 0), moved, 0.0, {}, None, None))

    for count in (1, 64, 8192):
        batch = (
            decode_batch(1, 8192) if count == 1 else prefill_batch(8192) if count == 8192 else tree_batch(1, 64, 8192)
        )
        pages = batch.block_table.numel() + 1
        pools = (random(pages, PAGE, KV_HEADS, DIM), random(pages, PAGE, KV_HEADS, DIM), random(pages, PAGE, DIM))
        packed, scale = (
            random(count, HEADS + 3 * KV_HEADS + 1, DIM),
            torch.randn(HEADS + 2 * KV_HEADS + 1, DIM, device="cuda"),
        )
        table, x = torch.randn(count, DIM, device="cuda"), random(count, HIDDEN)
        weight = torch.randn(HIDDEN, device="cuda")
        add(
            f"norm + rope + write {count}",
            lambda a=(packed, scale, table, table, 64, 1e-6, HEADS, *pools, KV_HEADS, batch): norm_rope.norm_rope_write(
                *a
            ),
            4.0 * packed.numel(),
        )
        add(f"add + norm {count}", lambda x=x, w=weight: norms.add_norm(x, x, w, 1e-6), 8.0 * x.numel())
        add(f"dual norm {count}", lambda x=x, w=weight: norms.dual_norm(x, x, w, w, 1e-6), 8.0 * x.numel())
    batch = tree_batch(8, 64, 4096)
    pages = batch.block_table.numel()
    k, v, index = (
        random(60, pages, PAGE, KV_HEADS, DIM),
        random(60, pages, PAGE, KV_HEADS, DIM),
        random(57, pages, PAGE, DIM),
    )
    path = torch.tensor([[2, 9, 37, 60]] * 8, device="cuda")
    add("commit B8 x 4 rows", lambda: commit_rows.commit_rows(k, v, index, path, batch), 2.0 * 8 * 4 * (134.25 * 1024))
    return rows


def loss_rows(timer: Timer, machine: Machine, wanted: Callable[[str], bool]) -> list[Row]:
    """linear + KL against the matrix products alone."""
    rows = []
    if wanted("linear + KL"):
        count = 4096
        state, teacher = random(count, HIDDEN), random(count, HIDDEN)
        head, teacher_head = random(VOCAB, HIDDEN) * 0.02, random(VOCAB, HIDDEN) * 0.02
        weights = torch.rand(count, device="cuda")

        def products(times: int) -> None:
            for part in state.split(2048):
                for _ in range(times):
                    torch.mm(part, head.T)

        plain = timer(lambda: products(2), repeats=5)
        forward = timer(lambda: linear_kl.linear_kl(state, head, teacher, teacher_head, weights), repeats=5)
        operations = 4.0 * count * VOCAB * HIDDEN
        parts = {"two matmuls": plain}
        rows.append(Row("linear + KL forward", forward, plain, 0.0, operations, parts, None, None))
        state.requires_grad_(), head.requires_grad_()

        def train() -> None:
            state.grad = head.grad = None
            linear_kl.linear_kl(state, head, teacher, teacher_head, weights)[0].backward()

        whole, four = timer(train, repeats=5), 2 * plain
        rows.append(Row("linear + KL training", whole, four, 0.0, 2 * operations, {"four matmuls": four}, None, None))
    return rows


def sampling_rows(timer: Timer, machine: Machine, wanted: Callable[[str], bool]) -> list[Row]:
    """The target's choice with the usual filters, and the draft's candidates, against torch.topk."""
    rows = []

    def add(name: str, run: Callable[[], object], logits: torch.Tensor, k: int) -> None:
        moved = 4.0 * logits.numel()
        parts = {"torch.topk": timer(lambda: torch.topk(logits, k, dim=-1), graph=True, repeats=10)}
        time = timer(run, graph=True, repeats=10)
        rows.append(Row(name, time, machine.floor(moved, 0), moved, 0.0, parts, None, None))

    for count in (1, 8, 64, 512):
        logits = 4 * torch.randn(count, VOCAB, device="cuda")
        floats, ids = torch.ones(count, device="cuda"), torch.arange(count, device="cuda")
        top_k, top_p = torch.full((count,), 40, dtype=torch.int32, device="cuda"), 0.95 * floats
        settings = (floats, top_k, top_p, 0 * floats, ids, ids, ids)
        if wanted(f"sample {count} rows"):
            add(f"sample {count} rows", partial(sample_tokens.sample_tokens, logits, *settings), logits, 40)
        for k in (8, 64):
            if wanted(f"best {k} of {count} rows"):
                add(f"best {k} of {count} rows", partial(top_rows.top_rows, logits, k), logits, k)
    return rows
