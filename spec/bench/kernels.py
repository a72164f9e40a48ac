"""Times every kernel on the shapes of MiniMax-M3 against its floor and against the fastest public kernels. Needs a CUDA
device.

Time: median over CUDA events, the L2 cache flushed before every run; decode and tree cases run inside a CUDA graph.
Floor: the larger of the bytes that must move over the copy bandwidth and the multiplications over the bf16 matmul rate,
both measured in the same run.
"""

import json
from dataclasses import asdict

import torch

from spec.bench import kernel_cases, msa_cases
from spec.bench.kernel_timing import Row, Timer, measure_machine
from target_model.errors import UserError


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
        msa_cases.attention_rows,
        kernel_cases.dense_rows,
        kernel_cases.row_kernel_rows,
        kernel_cases.expert_rows,
        kernel_cases.packed_rows,
        kernel_cases.loss_rows,
        kernel_cases.sampling_rows,
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
