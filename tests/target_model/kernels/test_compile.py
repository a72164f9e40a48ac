"""Every kernel still compiles for sm_90, on a machine without a GPU."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def compile_cases(*names: str, program: str = "compile_all") -> str:
    """What such a program prints, in a process where kernels are compiled, not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", f"tests.target_model.kernels.{program}", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_decode_kernels_compile():
    output = compile_cases("commit", "write")
    assert "commit_kernel" in output and "write_kernel" in output


@pytest.mark.slow
def test_all_kernels_compile_with_tensor_cores_and_without_large_spills():
    lines = [line.split() for line in compile_cases().splitlines() if "registers" in line]
    for words in lines:
        numbers = dict(zip(words[1::2], words[2::2], strict=False))
        assert int(numbers["stack"]) <= 96, words
        assert int(numbers["shared"]) <= 227 * 1024, words
        if words[0] in ("attention_kernel", "many_scores_kernel", "up_kernel", "down_kernel", "wide_kernel"):
            assert int(numbers["wgmma"]) + int(numbers["mma"]) > 0, words
    assert {words[0] for words in lines} == {
        "add_norm_kernel", "arrange_kernel", "attention_kernel", "best_kernel", "check_kernel", "choose_kernel",
        "column_gradient_kernel", "combine_kernel", "commit_kernel", "decide_kernel", "decode_kernel", "down_kernel",
        "dual_norm_kernel", "few_scores_kernel", "first_kernel", "gumbel_kernel", "kl_rows_kernel", "last_kernel",
        "logits_kernel", "many_scores_kernel", "maxima_kernel", "merge_column_kernel", "norm_rope_kernel",
        "place_kernel", "plan_kernel", "rope_write_kernel", "rotate_heads_kernel", "route_kernel", "scale_kernel",
        "silu_gradient_kernel", "silu_product_kernel", "union_kernel", "up_kernel", "weighted_sum_kernel",
        "wide_kernel", "widen_kernel", "write_kernel",
    }  # fmt: skip


@pytest.mark.slow
def test_all_kernels_of_the_bundled_pair_compile():
    """As the engine launches them: plain, chains and trees, greedy and sampled, alone and batched."""
    lines = [line for line in compile_cases(program="compile_engine").splitlines() if "registers" in line]
    assert len(lines) > 60
    for kernel in ("decode_kernel", "attention_kernel", "union_kernel", "commit_kernel", "up_kernel", "decide_kernel"):
        assert any(line.startswith(kernel) for line in lines), kernel
