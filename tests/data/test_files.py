from __future__ import annotations

import bz2
import gzip
import json
import lzma

import pytest

from hetero.data import load_dataset, read_rows
from hetero.errors import DataError, UnavailableError

ROWS = [{"prompt": "1+1?", "answer": "2"}, {"prompt": "zwei\nZeilen, „zitiert“ \u2028", "answer": "4"}]


def _write(path, suffix):
    if suffix == ".jsonl":
        text = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n"
    elif suffix == ".json":
        text = json.dumps(ROWS)
    else:
        sep = "," if suffix == ".csv" else "\t"
        text = f"prompt{sep}answer\r\n" + "".join(f'"{r["prompt"]}"{sep}{r["answer"]}\r\n' for r in ROWS)
    return text.encode()


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv"])
@pytest.mark.parametrize(
    ("packed", "compress"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)],
)
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_every_kind_reads_the_same_rows(tmp_path, suffix, packed, compress, bom):
    path = tmp_path / f"data{suffix}{packed}"
    path.write_bytes(compress(bom + _write(path, suffix)))
    assert [row for row, _ in read_rows(path)] == ROWS


def test_places_are_lines_of_the_file(tmp_path):
    jsonl = tmp_path / "a.jsonl"
    jsonl.write_text('\n{"a": 1}\n\n{"a": 2}\n')
    assert [where for _, where in read_rows(jsonl)] == ["a.jsonl line 2", "a.jsonl line 4"]
    table = tmp_path / "b.csv"
    table.write_text('a,b\n"two\nlines",2\n\n3,4\n')
    assert [where for _, where in read_rows(table)] == ["b.csv line 2", "b.csv line 5"]
    nested = tmp_path / "c.json"
    nested.write_text('{"version": 1, "rows": [{"a": 1}]}')
    assert [where for _, where in read_rows(nested)] == ["c.json row 1"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "a.jsonl line 2: not JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "a.jsonl line 2: expected an object"),
        ("a.jsonl", b'{"a": 1}\n{"a": "\xe9"}\n', "a.jsonl line 2: byte 0xe9 is not UTF-8"),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', "rename the file"),
        ("a.json", b'[{"a": 1}, 3]', "a.json row 2: expected an object"),
        ("a.json", b'{"a": [], "b": []}', "exactly one"),
        ("a.json", b'"x"', "expected a list of rows, got str"),
        ("a.csv", b"a,b\n1,2\n1,2,3\n", "a.csv line 3: 3 fields, but the header has 2"),
        ("a.csv", b"a,a\n1,2\n", "a.csv line 1: the header names a column twice"),
        ("a.csv", b'a,b\n"1"x,2\n', "a.csv line 2: not valid"),
        ("a.jsonl.gz", b"not gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000)[:-20], "cannot be read"),
        ("a.txt", b"hello", "cannot tell the kind"),
        ("a.jsonl", b"\n\n", "is empty"),
        ("a.csv", b"a,b\n", "is empty"),
        ("a.json", b"[]", "is empty"),
    ],
)
def test_bad_files_say_where_and_what(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        load_dataset(str(tmp_path / name))


def test_a_bad_parquet_file_says_so(tmp_path):
    pytest.importorskip("pyarrow")
    test_bad_files_say_where_and_what(tmp_path, "a.parquet", b"PAR1 no", "cannot be read as parquet")


def test_a_long_field_is_not_cut(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n" + "x" * 300_000 + ",1\n")
    assert len(load_dataset(str(tmp_path / "a.csv"))[0]["a"]) == 300_000


def test_parquet(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(
        arrow.Table.from_pylist([{"messages": [{"role": "user", "content": "x"}], "n": 3}]), path
    )
    assert load_dataset(str(path))[0] == {"messages": [{"role": "user", "content": "x"}], "n": 3}
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(UnavailableError, match="pip install pyarrow"):
        load_dataset(str(path))
