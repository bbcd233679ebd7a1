"""The objects that are compiled for one instruction set keep it to themselves.

A weak symbol (an inline function or template of the standard library) in an object that was compiled for
AVX-512 may be chosen by the linker for the whole extension, which then dies elsewhere. And an object
must hold no instruction beyond its own set.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
ISAS = sorted(path.stem.removeprefix("isa_") for path in (CSRC / "kernels").glob("isa_*.cc"))

EVEX = r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])\b"
FORBIDDEN = {
    "scalar": rf"%ymm|{EVEX}|\bv(add|mul|mov|fmadd)",
    "avx512bf16_emulated": rf"%ymm|{EVEX}|\bv(add|mul|mov|fmadd)|\btdp",
    "amx_emulated": rf"%ymm|{EVEX}|\bv(add|mul|mov|fmadd)|\btdp",
    "avx2": EVEX,
    "avx512": r"\bvdpbf16ps|\bvcvtne2?ps2?.*bf16|\btdp|\btileload|\bvpdpbusd",
    "avx512vnni": r"\bvdpbf16ps|\bvcvtne2?ps2?.*bf16|\btdp|\btileload",
    "avx512bf16": r"\btdp|\btileload|\bvpdpbusd",
    "amx": r"\bvpdpbusd|\btdpfp16",
}
"""What a disassembly must not show."""
REQUIRED = {
    "avx2": "%ymm",
    "avx512": "%zmm",
    "avx512vnni": "vpdpbusd",
    "avx512bf16": "vdpbf16ps",
    "amx": "tdpbf16ps",
}
"""What it must: the set is really used."""


def flags(isa: str) -> list[str]:
    """The code generation flags that CMakeLists.txt gives this object."""
    text = (ROOT / "CMakeLists.txt").read_text()
    shared = re.search(r"set\(HETERO_FLAGS (.*)\)", text)
    every = re.search(r"target_compile_options\(isa_\$\{name\} PRIVATE (.*?)\$\{ARGN\}", text, re.S)
    own = re.search(rf"hetero_isa\({isa}\b([^)]*)\)", text)
    avx512 = re.search(r"set\(AVX512_FLAGS (.*)\)", text)
    assert shared is not None
    assert every is not None
    assert own is not None
    assert avx512 is not None
    words = f"{shared[1]} {every[1]} {own[1].replace('${AVX512_FLAGS}', avx512[1])}".split()
    return [word for word in words if re.match(r"-[fmO]", word)]


def built(isa: str) -> Path | None:
    """The object that an earlier build left, if it is newer than every source it could depend on."""
    sources = [*CSRC.glob("base/*.h"), *CSRC.glob("kernels/*.h"), *CSRC.glob("kernels/*.inc")]
    sources += [CSRC / "kernels" / f"isa_{isa}.cc", ROOT / "CMakeLists.txt"]
    newest = max(source.stat().st_mtime for source in sources)
    for found in ROOT.glob(f"build/*/CMakeFiles/isa_{isa}.dir/csrc/kernels/isa_{isa}.cc.o"):
        if found.stat().st_mtime > newest:
            return found
    return None


@pytest.fixture(scope="module", params=ISAS)
def isa_object(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    isa = request.param
    if isa not in ("scalar", "amx_emulated", "avx512bf16_emulated") and os.uname().machine != "x86_64":
        pytest.skip("for x86-64 only")
    found = built(isa)
    if found is None:
        compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
        if compiler is None:
            pytest.skip("no C++ compiler")
        found = tmp_path_factory.mktemp("isa") / f"isa_{isa}.o"
        source = CSRC / "kernels" / f"isa_{isa}.cc"
        command = [compiler, "-std=c++20", "-fPIC", "-w", f"-I{CSRC}", *flags(isa), "-c", source, "-o", found]
        subprocess.run(command, check=True)
    return isa, found


def output(tool: str, *arguments: object) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"no {tool}")
    return subprocess.run([tool, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def test_no_weak_symbols(isa_object: tuple[str, Path]) -> None:
    isa, path = isa_object
    symbols = [line.split() for line in output("nm", path).splitlines()]
    assert not [symbol for symbol in symbols if symbol[-2] in "WwVvu"]
    exported = [symbol[-1] for symbol in symbols if symbol[-2].isupper() and symbol[-2] != "U"]
    assert len(exported) == 1
    assert f"kernels_{isa}E" in exported[0] + "E"


def test_only_memory_functions_are_needed_from_outside(isa_object: tuple[str, Path]) -> None:
    needed = {line.split()[-1] for line in output("nm", "-u", isa_object[1]).splitlines()}
    assert needed <= {
        "memcpy",
        "memset",
        "memmove",
        "_GLOBAL_OFFSET_TABLE_",
        "__tls_get_addr",
        "__stack_chk_fail",
    }


def test_no_instruction_of_another_set(isa_object: tuple[str, Path]) -> None:
    isa, path = isa_object
    if os.uname().machine != "x86_64":
        pytest.skip("for x86-64 only")
    code = output("objdump", "-d", "--no-show-raw-insn", path)
    found = re.search(FORBIDDEN[isa], code)
    assert found is None, f"isa_{isa}.cc contains {found and found[0]}"
    assert REQUIRED.get(isa, "") in code
