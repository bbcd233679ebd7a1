"""The filter's program, run by a small interpreter of BPF: every number has the verdict of the table."""

from __future__ import annotations

import struct

import pytest

from hetero.sandbox.launcher import seccomp

PASS, EPERM, ENOSYS, NO_FAMILY, DONE = (
    seccomp.ALLOW,
    *(seccomp.ERRNO | n for n in (1, 38, 97, 0)),
)


def run(code: bytes, machine: str, number: int, *arguments: int) -> int:
    """What the kernel would answer to a system call."""
    words = [*arguments, *[0] * 6][:6]
    data = struct.pack("<iIQ6Q", number, seccomp._ARCH[machine], 0, *words)
    at, held = 0, 0
    while True:
        kind, yes, no, value = struct.unpack_from("<HBBI", code, at * 8)
        at += 1
        if kind == 0x20:
            (held,) = struct.unpack_from("<I", data, value)
        elif kind == 0x06:
            return int(value)
        elif kind == 0x05:
            at += value
        else:
            held_so = {0x15: held == value, 0x35: held >= value, 0x45: held & value != 0}[kind]
            at += yes if held_so else no


@pytest.mark.parametrize("machine", seccomp.MACHINES)
@pytest.mark.parametrize("anonymous", [True, False])
def test_every_number_has_its_verdict(machine: str, anonymous: bool) -> None:
    code = seccomp.program(machine, anonymous_files=anonymous)
    column = list(seccomp.MACHINES).index(machine)
    judged = seccomp._SPECIAL[machine]
    refused = {numbers[column] for numbers in seccomp.DENIED.values()} - {-1}
    if not anonymous:
        refused |= {numbers[column] for numbers in seccomp.UNCOUNTED.values()}
    for number in range(seccomp.LAST_KNOWN + 1):
        if number not in judged.values():
            assert run(code, machine, number) == (EPERM if number in refused else PASS), number
    for number in (seccomp.LAST_KNOWN + 1, 500, 0x3FFFFFFF):
        assert run(code, machine, number) == ENOSYS
    assert run(code, machine, judged["clone3"]) == ENOSYS
    if machine == "x86_64":  # numbers of x32
        assert run(code, machine, 0x40000000 + 1) == seccomp.KILL
    other = next(name for name in seccomp.MACHINES if name != machine)
    assert run(code, other, 0) == seccomp.KILL


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_arguments_decide(machine: str) -> None:
    code, closed = seccomp.program(machine), seccomp.program(machine, families=())
    number = seccomp._SPECIAL[machine]
    for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert run(code, machine, number["clone"], flag | 17) == EPERM
    assert run(code, machine, number["clone"], 0x3D0F00) == PASS  # a thread
    for family in range(50):
        known = PASS if family in seccomp.FAMILIES else NO_FAMILY
        assert run(code, machine, number["socket"], family) == known
        assert run(closed, machine, number["socket"], family) == NO_FAMILY
        for each in (code, closed):
            assert run(each, machine, number["socketpair"], family) == known
    for persona, verdict in ((0, PASS), (0xFFFFFFFF, PASS), (0x40000, PASS), (8, EPERM), (0x400000, EPERM)):
        assert run(code, machine, number["personality"], persona) == verdict
    for request, verdict in ((0x5412, EPERM), (0x541C, EPERM), (0x5413, PASS), (0, PASS)):
        assert run(code, machine, number["ioctl"], 0, request) == verdict
    assert run(code, machine, number["setrlimit"], 4, 1) == DONE
    assert run(code, machine, number["setrlimit"], 7, 1) == PASS
    limits = number["prlimit64"]
    assert run(code, machine, limits, 0, 4, 0x1000) == DONE
    assert run(code, machine, limits, 0, 4, 0x100000000) == DONE
    assert run(code, machine, limits, 0, 4, 0) == PASS
    assert run(code, machine, limits, 0, 7, 0x1000) == PASS


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(OSError, match="riscv64"):
        seccomp.program("riscv64")
