"""Times every kernel on the shapes of MiniMax-M3 against its floor and against the fastest public kernels. Needs a CUDA
device.

Time: median over CUDA events, the L2 cache flushed before every run; decode and tree cases run inside a CUDA graph.
Floor: the larger of the bytes that must move over the copy bandwidth and the multiplications over the bf16 matmul rate,
both measured in the same run.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from target_model.batch import Batch
from target_model.errors import UserError
from target_model.kernels import select_blocks, sparse_attention

HEADS, KV_HEADS, DIM, PAGE, TOP_K = 64, 4, 128, 128, 16
SCALE = DIM**-0.5
# Microseconds for index and attention together of the best public kernels on an H200 (2026-11-29), and for dense
# attention.
PUBLIC = {
    "decode B1 8k": (20.4, 28.9), "decode B1 32k": (22.2, 39.9), "decode B1 128k": (28.8, 87.7),
    "decode B16 32k": (68.1, 246),
    "decode B64 32k": (204, 939), "decode B16 128k": (159, 943), "tree B1x8 32k": (30.7, 55), "tree B1x64 32k": (92.4,
    232),
    "tree B8x8 32k": (88.3, 238), "tree B8x16 32k": (141, 435), "tree B8x64 32k": (577, 904), "tree B32x16 32k": (490,
    946),
    "tree B32x64 32k": (1549, 3810), "prefill 8k": (4021, 1763), "prefill 32k": (18615, 29005), "prefill 128k": (97751,
    498928),
}  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """What this device does at best: bytes/s of a large copy (read + written) and FLOP/s of a large bf16 product."""

    name: str
    bandwidth: float
    matmul_rate: float

    def floor(self, moved: float, operations: float) -> float:
        """Microseconds."""
        return 1e6 * max(moved / self.bandwidth, operations / self.matmul_rate)


@dataclass(frozen=True)
class Row:
    """One line of the table. Times in microseconds; `parts` names the pieces of `time`, each timed alone."""

    case: str
    time: float
    floor: float
    moved_bytes: float
    operations: float
    parts: dict[str, float]
    public_best: float | None
    public_dense: float | None


class Timer:
    """Median time of a function on the device, L2 cold."""

    def __init__(self) -> None:
        self.flush = torch.zeros(64 << 20, device="cuda")
        self.sink = torch.zeros((), device="cuda")

    def __call__(self, run: Callable[[], object], *, graph: bool = False, repeats: int = 30) -> float:
        """Microseconds."""
        run()
        torch.cuda.synchronize()
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                run()
            run = captured.replay
        for _ in range(2):
            run()
        pairs = []
        for _ in range(repeats):
            torch.sum(
                self.flush, 0, out=self.sink
            )  # read, not written: dirty lines would be written back in the timed part
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return 1e3 * statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def measure_machine(timer: Timer) -> Machine:
    """Copy bandwidth and matmul rate, on random data."""
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    copy = timer(lambda: target.copy_(source), repeats=10)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = timer(lambda: a @ b, repeats=10)
    return Machine(torch.cuda.get_device_name(), 2 * (4 << 30) / (copy * 1e-6), 2 * 8192**3 / (product * 1e-6))


def scattered_tables(sequences: int, pages: int) -> list[list[int]]:
    """Block tables over a shuffled pool."""
    order = torch.randperm(sequences * pages, generator=torch.Generator().manual_seed(0)).tolist()
    return [order[r * pages : (r + 1) * pages] for r in range(sequences)]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def decode_batch(sequences: int, context: int) -> Batch:
    """One row a sequence, the last of `context` tokens."""
    tables = scattered_tables(sequences, context // PAGE)
    return Batch.causal(PAGE, "cuda", [[0]] * sequences, [context - 1] * sequences, tables)


def prefill_batch(context: int) -> Batch:
    """A whole prompt."""
    return Batch.causal(PAGE, "cuda", [[0] * context], [0], scattered_tables(1, context // PAGE))


def tree_batch(sequences: int, nodes: int, context: int) -> Batch:
    """Trees of width 4: node i hangs on node (i - 1) // 4."""
    depth, mask = [0], [1]
    for node in range(1, nodes):
        parent = (node - 1) // 4
        depth.append(depth[parent] + 1)
        mask.append(mask[parent] | 1 << node)
    tables = scattered_tables(sequences, context // PAGE + 1)
    tokens = [[0] * nodes] * sequences
    return Batch.tree(PAGE, "cuda", tokens, [context - 64] * sequences, tables, [depth] * sequences, [mask] * sequences)


def index_queries(batch: Batch, *, correlation: float, chain: bool) -> Tensor:
    """[T, K, D] whose choices overlap between rows as seen in practice: 8 neighbours choose about 21 (prefill) or 50
    (trees) blocks.

    chain: each row resembles the one before it; else all rows of a sequence resemble one vector.
    """
    fresh = (1 - correlation**2) ** 0.5
    rows = batch.max_rows
    noise = torch.randn(batch.num_sequences, rows, KV_HEADS, DIM, device="cuda")
    if chain:
        # x[t] = c x[t-1] + fresh noise, as a weighted cumulative sum in stretches short enough for fp32.
        state = torch.randn_like(noise[:, 0])
        out = torch.empty_like(noise)
        for begin in range(0, rows, 1024):
            piece = noise[:, begin : begin + 1024]
            power = (
                correlation ** torch.arange(1, piece.shape[1] + 1, device="cuda", dtype=torch.float64)[:, None, None]
            )
            sums = torch.cumsum(piece.double() / power, 1) * fresh + state.double()[:, None]
            out[:, begin : begin + 1024] = (sums * power).float()
            state = out[:, min(begin + 1024, rows) - 1]
        noise = out
    else:
        noise = correlation * torch.randn_like(noise[:, :1]) + fresh * noise
    return noise.reshape(-1, KV_HEADS, DIM).to(torch.bfloat16)


def attention_case(name: str, batch: Batch, timer: Timer, machine: Machine, *, kind: str) -> Row:
    """Index and sparse attention of one layer: each alone, then together."""
    graph = kind != "prefill"
    pages = batch.block_table.numel() + 1
    index_pool, k_pool, v_pool = (
        random(pages, PAGE, DIM),
        random(pages, PAGE, KV_HEADS, DIM),
        random(pages, PAGE, KV_HEADS, DIM),
    )
    index_q = index_queries(batch, correlation=0.998 if kind == "prefill" else 0.95, chain=kind == "prefill")
    q = random(batch.num_rows, HEADS, DIM)

    def index() -> Tensor:
        return select_blocks.select_blocks(index_q, index_pool, batch, TOP_K, 0, 1)

    blocks = index()

    def attend() -> Tensor:
        return sparse_attention.sparse_attention(q, k_pool, v_pool, blocks, batch, SCALE)

    def both() -> Tensor:
        return sparse_attention.sparse_attention(q, k_pool, v_pool, index(), batch, SCALE)

    repeats = 30 if graph else 5
    parts = {
        "index": timer(index, graph=graph, repeats=repeats),
        "attention": timer(attend, graph=graph, repeats=repeats),
    }
    both_time = timer(both, graph=graph, repeats=repeats)
    moved, operations = attention_work(batch, blocks)
    floor = sum(machine.floor(m, o) for m, o in zip(moved, operations, strict=True))
    return Row(name, both_time, floor, sum(moved), sum(operations), parts, *PUBLIC.get(name, (None, None)))


def attention_work(batch: Batch, blocks_TKN: Tensor) -> tuple[tuple[float, float], tuple[float, float]]:
    """((index bytes, attention bytes), (index FLOPs, attention FLOPs)) that cannot be avoided."""
    rows_of = torch.repeat_interleave(torch.arange(batch.num_sequences), torch.tensor(batch.row_counts)).cuda()
    wide = batch.max_context // PAGE + 2
    ids = (rows_of[:, None, None] * KV_HEADS + torch.arange(KV_HEADS, device="cuda")[None, :, None]) * wide + blocks_TKN
    distinct = ids[blocks_TKN >= 0].unique().numel()
    ends = (batch.positions + 1).double()
    contexts = batch.committed.double().sum() + (batch.num_rows if batch.ancestors is None else 0)
    own = torch.minimum(ends, torch.full_like(ends, float(TOP_K * PAGE)))
    row_bytes = 2 * batch.num_rows * DIM
    moved = (float(contexts) * DIM * 2 + row_bytes * KV_HEADS, distinct * PAGE * DIM * 4.0 + 2 * row_bytes * HEADS)
    operations = (2.0 * DIM * KV_HEADS * float(ends.sum()), 4.0 * DIM * HEADS * float(own.sum()))
    return moved, operations


def attention_rows(timer: Timer, machine: Machine, wanted: Callable[[str], bool]) -> Iterator[Row]:
    """MSA in decode, tree verification and prefill."""
    cases = [(f"decode B{b} {c}k", "decode", (b, c * 1024)) for b in (1, 16, 64) for c in (8, 32, 128)]
    cases += [(f"tree B{b}x{n} 32k", "tree", (b, n, 32768)) for b in (1, 8, 32) for n in (8, 16, 64)]
    cases += [(f"prefill {c}k", "prefill", (c * 1024,)) for c in (8, 32, 128)]
    make = {"decode": decode_batch, "tree": tree_batch, "prefill": prefill_batch}
    for name, kind, arguments in cases:
        if wanted(name):
            yield attention_case(name, make[kind](*arguments), timer, machine, kind=kind)
            torch.cuda.empty_cache()


def line(row: Row) -> str:
    """One row of the printed table."""
    parts = "  ".join(f"{name} {micros:9.1f}" for name, micros in row.parts.items())
    public = f"{row.public_best / row.time:5.2f}x" if row.public_best else "     -"
    dense = f"{row.public_dense / row.time:5.2f}x" if row.public_dense else "     -"
    share = f"{100 * row.floor / row.time:4.0f} % of floor {row.floor:9.1f}"
    return f"{row.case:24s} {row.time:10.1f} us  {share}  vs best {public}  vs dense {dense}  {parts}"


def main(wanted: str = "") -> dict:
    """Runs the cases whose name contains one of the words in `wanted` (comma-separated; "": all), prints the table and,
    last, one JSON line, which it also returns."""
    from spec.bench import kernel_cases  # imports this module

    if not torch.cuda.is_available():
        raise UserError("spec bench kernels needs a CUDA device")
    torch.manual_seed(0)
    timer = Timer()
    machine = measure_machine(timer)
    rates = f"copy {machine.bandwidth / 1e12:.2f} TB/s, bf16 matmul {machine.matmul_rate / 1e12:.0f} TFLOP/s"
    print(f"{machine.name}: {rates}", flush=True)

    def chosen(name: str) -> bool:
        return any(word in name for word in wanted.split(","))

    rows: list[Row] = []
    groups = (
        attention_rows,
        kernel_cases.dense_rows,
        kernel_cases.row_kernel_rows,
        kernel_cases.expert_rows,
        kernel_cases.loss_rows,
    )
    for group in groups:
        for row in group(timer, machine, chosen):
            rows.append(row)
            print(line(row), flush=True)
        torch.cuda.empty_cache()
    result = {"device": machine.name, "bandwidth": machine.bandwidth, "matmul_rate": machine.matmul_rate}
    result["rows"] = [asdict(row) for row in rows]
    print(json.dumps(result))
    return result
