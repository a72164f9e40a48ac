"""Compiles every kernel for sm_90 with the shapes of MiniMax-M3, without a GPU: run as a program, in a process without
TRITON_INTERPRET.

The public wrappers are called on CPU tensors; each launch is compiled instead of run. Prints one line a kernel: name,
warps, stages, shared memory, registers, spilled bytes.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64",
    torch.uint8: "*u8", torch.int8: "*i8", torch.int16: "*i16", torch.float8_e4m3fn: "*fp8e4nv", torch.bool: "*i1",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "num_ctas", "launch_pdl", "maxnreg")
compiled: dict[tuple, str] = {}


def describe(kernel) -> str:
    """Registers and spills of a compiled kernel, read from its machine code."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", text)
    wgmma = kernel.asm["ptx"].count("wgmma.mma_async")
    mma = kernel.asm["ptx"].count("mma.sync")
    copies = kernel.asm["ptx"].count("cp.async.c")
    return (
        f"shared {kernel.metadata.shared:6d}  registers {usage and usage[1]:>4}  stack {usage and usage[2]:>4}"
        f"  wgmma {wgmma:3d}  mma {mma:3d}  cp.async {copies:3d}"
    )


def compile_instead(self, *args, grid, warmup, **kwargs):
    """Stands in for JITFunction.run: the same specialisation of arguments, no driver."""
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    bound = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(self.params):
        value = bound[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            element = TYPES[value.base.dtype].removeprefix("*")
            signature[parameter.name] = f"tensordesc<{element}{list(value.block_shape)},{value.layout!r}>"
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    key = (self.fn.__name__, str(signature), str(constants), str(options))
    if key not in compiled:
        language = GluonASTSource if self.is_gluon() else ASTSource
        source = language(self, signature, constants, attributes)
        kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        compiled[key] = describe(kernel)
        print(
            f"{self.fn.__name__:24s} warps {options['num_warps']} stages {options['num_stages']}  {compiled[key]}",
            flush=True,
        )


def main(names: list[str]) -> None:
    JITFunction.run = compile_instead
    from tests.target_model.kernels import compile_cases

    for name, case in compile_cases.CASES.items():
        if not names or any(part in name for part in names):
            print(f"-- {name}", flush=True)
            case()


if __name__ == "__main__":
    main(sys.argv[1:])
