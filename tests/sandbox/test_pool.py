"""Pools: warm boxes, back-pressure, and nobody starves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from hetero.errors import ArgumentError
from hetero.sandbox.aio import AsyncSandbox
from hetero.sandbox.crowd import crowd
from hetero.sandbox.errors import SandboxDead
from hetero.sandbox.pool import Pool
from hetero.sandbox.sandbox import Sandbox


def test_more_leases_than_boxes_wait_and_all_are_served() -> None:
    async def run() -> tuple[list[str], int, Pool]:
        most, now = 0, 0

        async def one(pool: Pool, number: int) -> str:
            nonlocal most, now
            async with pool.lease() as box:
                now += 1
                most = max(most, now)
                result = await box.exec(["echo", str(number)])
                now -= 1
                return result.stdout

        async with Pool(warm=(1, 3), max_live=4, max_running=2) as pool:
            said = await asyncio.gather(*(one(pool, number) for number in range(24)))
        return list(said), most, pool

    said, most, pool = asyncio.run(run())
    assert said == [f"{number}\n" for number in range(24)]
    assert most <= 4
    assert pool.stats.leased == 24
    assert pool.stats.create_failures == 0
    assert pool.stats.warm_hits > 0


def test_a_pool_forks_a_snapshot(box: Sandbox) -> None:
    box.write_file("prepared", "yes")

    async def run() -> bytes:
        with box.snapshot() as sealed:
            async with Pool(sealed, warm=(0, 1), max_live=2) as pool, pool.lease() as leased:
                return await leased.read_file("prepared")

    assert asyncio.run(run()) == b"yes"


def test_a_failed_making_frees_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with Pool(warm=(0, 0), max_live=1) as pool:
            with monkeypatch.context() as patch:
                patch.setattr(Sandbox, "create", lambda *_, **__: (_ for _ in ()).throw(SandboxDead("none")))
                for _ in range(3):
                    with pytest.raises(SandboxDead):
                        async with pool.lease():
                            pass
            async with pool.lease() as box:
                assert (await box.exec(["true"])).ok

    asyncio.run(run())


def test_cancelled_commands_are_killed() -> None:
    async def run() -> None:
        async with await AsyncSandbox.create() as box:
            task = asyncio.create_task(box.exec(["sleep", "60"]))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await box.exec("pgrep sleep")).exit == 1
            process = await box.start("echo a; echo b")
            streamed = b"".join([data async for _, data in box.stream(process)])
            assert streamed == b"a\nb\n"

    asyncio.run(run())


def test_bad_watermarks_and_closed_pools_are_refused() -> None:
    with pytest.raises(ArgumentError, match="must rise"):
        Pool(warm=(3, 2))

    async def run() -> None:
        with pytest.raises(SandboxDead, match="not open"):
            async with Pool().lease():
                pass

    asyncio.run(run())


@pytest.mark.parametrize("num_boxes", [12, pytest.param(64, marks=pytest.mark.slow)])
def test_a_crowd_is_served_in_its_order_and_nobody_fails(num_boxes: int) -> None:
    """More boxes that run tests than there are cores: all wait, in the order in which they came, and all
    pass."""
    found = asyncio.run(crowd(num_boxes, max_running=2))
    assert found.failures == []
    assert found.order == list(range(num_boxes))
    assert found.most == 2
    assert len(found.started) == num_boxes
    assert max(found.queued) > max(found.started), "it was no crowd: nobody waited long for a turn"


def test_a_failure_in_a_crowd_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero.sandbox.crowd._TESTS", "raise SystemExit(3)")
    assert len(asyncio.run(crowd(3, max_running=2)).failures) == 3


def test_commands_without_a_pool_do_not_fail_for_their_number(make_box: Callable[..., Sandbox]) -> None:
    boxes = [make_box() for _ in range(24)]
    with ThreadPoolExecutor(48) as threads:
        waiting = [threads.submit(box.exec, ["echo", str(n)]) for n, box in enumerate(boxes * 2)]
        assert [done.result().stdout for done in waiting] == [f"{n}\n" for n in range(48)]


def test_a_pool_of_another_tier_and_its_interpreters() -> None:
    async def run() -> tuple[str, str]:
        async with Pool(warm=(1, 1), max_live=2, tier="landlock") as pool, pool.lease() as box:
            await box.python("x = 6")
            told = await box.python("x * 7")
            return box.isolation.tier, told.stdout

    assert asyncio.run(run()) == ("landlock", "42\n")
