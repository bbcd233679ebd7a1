"""Every test of sandboxes has a store of its own session; without user namespaces all are skipped."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetero.sandbox import client, context
from hetero.sandbox.errors import IsolationUnavailable
from hetero.sandbox.policy import Policy
from hetero.sandbox.sandbox import Sandbox


@pytest.fixture(scope="session", autouse=True)
def store() -> Iterator[Path]:
    """A store that the boxes' user can reach (pytest's own directories are private to root)."""
    path = Path(tempfile.mkdtemp(prefix="hetero-store-", dir=os.environ.get("HETERO_TEST_STORE")))
    path.chmod(0o755)
    before = os.environ.get("HETERO_STORE")
    os.environ["HETERO_STORE"] = str(path)
    client.stop()
    try:
        Sandbox.create().close()
    except IsolationUnavailable as error:
        shutil.rmtree(path, ignore_errors=True)
        pytest.skip(f"no sandboxes on this machine: {error}", allow_module_level=True)
    yield path
    client.stop()
    assert list((path / "runs").iterdir()) == [], "a run left directories behind"
    shutil.rmtree(path)
    if before is None:
        del os.environ["HETERO_STORE"]
    else:
        os.environ["HETERO_STORE"] = before


@pytest.fixture
def box() -> Iterator[Sandbox]:
    """A box of the host image."""
    with Sandbox.create() as made:
        yield made


@pytest.fixture
def make_box() -> Iterator[Callable[..., Sandbox]]:
    """Makes boxes that are closed at the end. `weaken` names defences that are switched off."""
    made: list[Sandbox] = []

    def make(*weaken: str, policy: Policy | None = None, image: object = None) -> Sandbox:
        found = Sandbox.create(image, policy=policy, _weaken=weaken)  # type: ignore[arg-type]
        made.append(found)
        return found

    yield make
    for each in made:
        each.close()


@pytest.fixture
def host_dir() -> Iterator[Path]:
    """A directory of the host that the boxes' user can read."""
    path = Path(tempfile.mkdtemp(prefix="hetero-host-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def journal() -> Path:
    """The journal of this process."""
    return context.context().audit.path
