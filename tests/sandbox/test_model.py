"""Random programs of create, exec, write, snapshot, fork, pause, resume and close against a model of the
tree."""

from __future__ import annotations

import copy
import random
import shlex

import pytest

from hetero.sandbox.sandbox import Sandbox

Tree = dict[str, str]
LIST = (
    "find . -type f -printf '%P\\n' | sort | while read f; do"
    ' printf \'%s\\n%s\\n\' "$f" "$(cat "$f")"; done'
)


def seen(box: Sandbox) -> Tree:
    """The files under /workspace, by path."""
    rows = box.exec(LIST).stdout.splitlines()
    return dict(zip(rows[::2], rows[1::2], strict=True))


class Machine:
    """Boxes and what they should hold."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.boxes: list[tuple[Sandbox, Tree]] = [(Sandbox.create(), {})]

    def step(self) -> None:
        """One random operation on one random box."""
        index = self.random.randrange(len(self.boxes))
        box, tree = self.boxes[index]
        if box.state != "live":
            box.resume()
            return
        names = (
            "write",
            "exec",
            "remove",
            "move",
            "snapshot",
            "fork",
            "freeze",
            "hibernate",
            "close",
            "create",
        )
        getattr(self, self.random.choices(names, (6, 4, 3, 2, 2, 2, 1, 1, 1, 1))[0])(box, tree)

    def path(self) -> str:
        """A path out of few, so that operations meet."""
        return "/".join(self.random.choice("abc") for _ in range(self.random.randint(1, 3)))

    def fits(self, tree: Tree, path: str) -> bool:
        """Whether a file can be put there: no file above, no directory in its place."""
        parts = path.split("/")
        above = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        return not above & tree.keys() and not any(name.startswith(path + "/") for name in tree)

    def write(self, box: Sandbox, tree: Tree) -> None:
        path, text = self.path(), str(self.random.random())
        exists = box.exec(["test", "-d", path]).ok
        if self.fits(tree, path) and not exists:
            box.write_file(path, text)
            tree[path] = text
        else:
            with pytest.raises(OSError):
                box.write_file(path, text)

    def exec(self, box: Sandbox, tree: Tree) -> None:
        path, text = self.path(), str(self.random.random())
        quoted = shlex.quote(path)
        if box.exec(f"mkdir -p $(dirname {quoted}) && printf %s {text} >> {quoted}").ok:
            assert self.fits(tree, path)
            tree[path] = tree.get(path, "") + text

    def remove(self, box: Sandbox, tree: Tree) -> None:
        path = self.path()
        assert box.exec(["rm", "-rf", path]).ok
        for name in [name for name in tree if name == path or name.startswith(path + "/")]:
            del tree[name]

    def move(self, box: Sandbox, tree: Tree) -> None:
        source, target = self.path(), self.path()
        if source not in tree or not self.fits(tree, target) or source == target:
            return
        done = box.exec(f"mkdir -p $(dirname {target}) && test ! -d {target} && mv {source} {target}")
        if done.ok:
            tree[target] = tree.pop(source)

    def snapshot(self, box: Sandbox, tree: Tree) -> None:
        mode = "stop" if self.random.random() < 0.7 else "frozen_copy"
        with box.snapshot(mode) as sealed:  # type: ignore[arg-type]
            if len(self.boxes) < 6:
                [child] = sealed.fork(1)
                self.boxes.append((child, copy.copy(tree)))

    def fork(self, box: Sandbox, tree: Tree) -> None:
        if len(self.boxes) < 5:
            self.boxes += [(child, copy.copy(tree)) for child in box.fork(2)]

    def freeze(self, box: Sandbox, tree: Tree) -> None:
        box.pause("freeze")

    def hibernate(self, box: Sandbox, tree: Tree) -> None:
        box.pause("hibernate")

    def close(self, box: Sandbox, tree: Tree) -> None:
        if len(self.boxes) > 1:
            box.close()
            self.boxes = [pair for pair in self.boxes if pair[0] is not box]

    def create(self, box: Sandbox, tree: Tree) -> None:
        if len(self.boxes) < 6:
            self.boxes.append((Sandbox.create(), {}))


def play(seed: int, steps: int) -> None:
    machine = Machine(seed)
    try:
        for number in range(steps):
            machine.step()
            if number % 20 == 19:
                for box, tree in machine.boxes:
                    if box.state == "live":
                        assert seen(box) == tree, (seed, number)
        for box, tree in machine.boxes:
            if box.state != "live":
                box.resume()
            assert seen(box) == tree, seed
    finally:
        for box, _ in machine.boxes:
            box.close()


@pytest.mark.parametrize("seed", range(2))
def test_a_hundred_random_steps(seed: int) -> None:
    play(seed, 100)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_a_thousand_random_steps(seed: int) -> None:
    play(seed, 1000)
