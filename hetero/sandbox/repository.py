"""Repositories for tasks: one commit and nothing else, so that no history holds the solution."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from hetero.sandbox.errors import ImageError

_ENVIRONMENT = {
    "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ALLOW_PROTOCOL": "",  # a partial clone would fetch what it lacks, by a command that it names itself
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_AUTHOR_NAME": "task",
    "GIT_AUTHOR_EMAIL": "task@localhost",
    "GIT_COMMITTER_NAME": "task",
    "GIT_COMMITTER_EMAIL": "task@localhost",
    "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
    "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
}


def prepare_repository(source: Path, commit: str, target: Path, secrets: tuple[str, ...] = ()) -> str:
    """Make `target` a repository with the files of `source` at `commit` as its single commit; that commit's
    id.

    The files are exported without .git and committed anew: no remote, tag, branch, reflog, stash,
    hook, alternate, submodule or dangling object can come along. Hooks and configuration of `source` are not
    read.

    Args:
        secrets: object ids, such as the fix's commit, that must not be there; checked at the end.

    Raises ImageError when git fails or a secret is found.
    """
    if target.exists() and any(target.iterdir()):
        raise ImageError(f"{target} is not empty.", "Name a new directory.")
    target.mkdir(parents=True, exist_ok=True)
    export(source, commit, target)
    _git(target, "init", "--quiet", "--initial-branch=main", "--template=")
    _git(target, "add", "--all", "--force")
    _git(target, "commit", "--quiet", "--allow-empty", "--no-verify", "--message=Task")
    shutil.rmtree(target / ".git" / "logs", ignore_errors=True)
    head = _git(target, "rev-parse", "HEAD").decode().strip()
    for secret in secrets:
        if has_object(target, secret):
            raise ImageError(f"The object {secret} is in the prepared repository: it would leak.")
    return head


def export(source: Path, commit: str, target: Path) -> None:
    """The files of a commit, by way of an empty repository in `target` that borrows the objects: nothing that
    the configuration of `source` names as a filter or monitor is run, and no attribute leaves a file out.

    Raises ImageError when git fails.
    """
    name = _git(source, "rev-parse", "--verify", "--end-of-options", commit).decode().strip()
    objects = source / _git(source, "rev-parse", "--git-path", "objects").decode().strip()
    borrowed = {"GIT_ALTERNATE_OBJECT_DIRECTORIES": str(objects.resolve())}
    _git(target, "init", "--quiet", "--template=")
    _git(target, "read-tree", name, **borrowed)
    _git(target, "checkout-index", "--all", "--force", **borrowed)
    shutil.rmtree(target / ".git")


def has_object(repository: Path, name: str) -> bool:
    """Whether the repository's object store holds that object."""
    done = subprocess.run(
        ["git", "-C", str(repository), "cat-file", "-e", name],
        env=_ENVIRONMENT,
        check=False,
        capture_output=True,
    )
    return done.returncode == 0


def _git(directory: Path, *arguments: str, **variables: str) -> bytes:
    safe = ["-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "safe.directory=*"]
    try:
        done = subprocess.run(
            ["git", *safe, "-C", str(directory), *arguments],
            env={**_ENVIRONMENT, **variables},
            check=False,
            capture_output=True,
        )
    except OSError as error:
        raise ImageError(f"git cannot be run: {error}.", "Install git.") from error
    if done.returncode != 0:
        raise ImageError(f"git {arguments[0]} failed in {directory}: {done.stderr.decode()[:300]}")
    return done.stdout
