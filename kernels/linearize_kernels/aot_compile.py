"""One kernel compiled for one card, and what its machine code says about itself. Importing it imports triton."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .triton_ops.launch import FLOATS, Case

# 16-byte accesses of global memory, and the instructions of each generation's tensor cores.
WIDE_PTX = re.compile(
    r"(?:ld|st)\.global[.\w:]*\.v(?:4\.[bfus]32|2\.[bfus]64)"
    r"|cp\.async\.c[ag]\.shared\.global[^;]*, 0x10,|cp\.async\.bulk"
)
WIDE_GCN = re.compile(r"(?:global|buffer)_(?:load|store)_dwordx4")
TENSOR_CORE = (("tcgen05", "tcgen05.mma"), ("wgmma", "wgmma.mma_async"), ("mma", "mma.sync"), ("mfma", "v_mfma"))


def target_of(arch: str) -> GPUTarget:
    return GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)


def compile_case(fn: Any, case: Case, arch: str) -> dict[str, Any]:
    """The fields of `aot.Cost` that the compiled kernel decides."""
    compiled = compile_kernel(fn, case, arch)
    found = _amd(compiled) if arch.startswith("gfx") else _nvidia(compiled)
    found["narrow_offsets"] = narrow_offsets(compiled.asm["ttir"])
    return found


def compile_kernel(fn: Any, case: Case, arch: str) -> Any:
    signature, attributes = {}, {}
    for i, (name, parameter) in enumerate(zip(fn.arg_names, fn.params, strict=True)):
        if name in case.values:
            signature[name] = "constexpr"
        elif name in case.types:
            kind = case.types[name]
            signature[name] = f"*{kind}"
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif name in FLOATS:
            signature[name] = "fp32"
        else:
            signature[name] = "i32"
            if name.startswith("stride") and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    values = {name: value for name, value in case.values.items() if name in fn.arg_names}
    source = ASTSource(fn=fn, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": case.row.num_warps, "num_stages": case.row.num_stages}
    return triton.compile(source, target=target_of(arch), options=options)


def _nvidia(compiled: Any) -> dict[str, Any]:
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    numbers = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", said.stdout)
    assert numbers is not None, said.stdout
    registers, stack, static = map(int, numbers.groups())
    text = compiled.asm["ptx"]
    return {
        "registers": registers,
        "stack": stack,
        "shared": compiled.metadata.shared + static,
        "wide": len(WIDE_PTX.findall(text)),
        "tensor_core": _tensor_core(text),
    }


def _amd(compiled: Any) -> dict[str, Any]:
    text = compiled.asm["amdgcn"]

    def number(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        return int(found.group(1)) if found else 0

    return {
        "registers": number("vgpr_count"),
        "stack": number("vgpr_spill_count"),
        "shared": max(compiled.metadata.shared, number("group_segment_fixed_size")),
        "wide": len(WIDE_GCN.findall(text)),
        "tensor_core": _tensor_core(text),
    }


def _tensor_core(text: str) -> str:
    for name, mark in TENSOR_CORE:
        count = text.count(mark)
        if count:
            return f"{name} x{count}"
    return "-"


def narrow_offsets(ttir: str) -> int:
    """How many products of a stride are taken in 32 bits: past 2^31 elements they would wrap around.

    It sees products with an argument called stride..., or with what broadcasts and copies of one are called, alone:
    not those of constexprs (head dims) and of counts of heads, which offsets in dense buffers are made of.
    """
    # "%stride_q_t" itself, and any value made of nothing but a stride.
    strides = set(re.findall(r"%stride\w*", ttir))
    narrow = 0
    for name, op, operands, kind in re.findall(r"(%[\w#]+) = (\S+) ([^:\n]*?)(?: \{[^}]*\})? : (.*)", ttir):
        used = set(re.findall(r"%[\w#]+", operands))
        if not used & strides:
            continue
        if op in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
            strides.add(name)
        elif op == "arith.muli" and re.match(r"(?:tensor<[\dx]*)?i32", kind):
            narrow += 1
    return narrow
