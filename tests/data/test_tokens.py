"""Windows over tokens: those that a loop over all documents cuts, at any number of workers."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import spartito as sp
from spartito.data.blocks import json_lines, mds, tars, texts
from spartito.data.blocks.index import find_blocks
from spartito.data.blocks.reading import BlockFiles
from spartito.data.reading.loader import Loader
from spartito.data.windows import token_blocks
from spartito.data.windows.source import Layout, within
from spartito.data.windows.token_blocks import TokenBlock, join
from spartito.errors import UserError
from spartito.storage.files import match_files
from tests.data.packed_files import names, tokens, write_all
from tests.data.web_server import serving
from tests.replicas import Replicas

EOS = 255
LENGTH = 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks of a few documents, and a cache of this test's own."""
    for module in (json_lines, mds, tars, texts):
        monkeypatch.setattr(module, "TARGET", 400)
    monkeypatch.setattr(token_blocks, "TOGETHER", 100)
    monkeypatch.setenv("SPARTITO_CACHE", str(tmp_path / "cache"))


def letters(text: str) -> list[int]:
    return list(text.encode())


LETTERS: dict[str, Any] = {"tokenizer": letters, "tokenizer_name": "bytes", "eos": EOS}


def corpus(count: int = 60) -> list[str]:
    """Documents that differ, of all lengths, empty ones among them."""
    lengths = np.random.default_rng(3).integers(0, 90, count)
    return [f"{number}:" * bool(length) + "x" * length for number, length in enumerate(lengths)]


def write_texts(folder: Path, documents: Sequence[str], files: int = 3) -> None:
    folder.mkdir()
    for number in range(files):
        part = documents[number * len(documents) // files : (number + 1) * len(documents) // files]
        (folder / f"{number}.txt").write_text("\n\n".join(part))


def stream(documents: Sequence[str]) -> tuple[list[int], list[int]]:
    """The tokens of all documents, and which document each is of."""
    tokens, owners = list[int](), list[int]()
    for number, document in enumerate(documents):
        ids = [*letters(document), EOS] if document else []
        tokens += ids
        owners += [number] * len(ids)
    return tokens, owners


def ids(batches: Iterator[Any]) -> list[list[int]]:
    return [row for batch in batches for row in batch.data[0].tolist()]


# ---- the windows of any documents


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=20),
    cuts=st.sets(st.integers(0, 30)),
    step=st.integers(1, 24),
    more=st.integers(0, 1),
)
def test_windows_are_those_of_a_loop_over_all_tokens(
    lengths: list[int], cuts: set[int], step: int, more: int
) -> None:
    """For any documents, any blocks of them, and windows that are shorter or longer than both."""
    total, width = sum(lengths), step + more
    owners = np.repeat(np.arange(len(lengths)), lengths)
    edges = [0, *sorted(cut for cut in cuts if cut < len(lengths)), len(lengths)]
    blocks, first = [], 0
    for start, stop in pairwise(edges):
        filled = np.array([n for n in lengths[start:stop] if n], dtype=np.int64)
        size = int(filled.sum())
        numbers = np.arange(first, first + size)
        blocks.append(TokenBlock(numbers, np.cumsum(filled) - filled))
        first += size
    layout = Layout(np.array([len(block.tokens) for block in blocks]), step, width)
    begins = [at for at in range(0, total, step) if at + width <= total]
    assert len(layout) == len(begins)
    assert layout.edges[0] == 0
    assert (np.diff(layout.edges) > 0).all()
    found = []
    for home in range(len(layout.homes)):
        block, start, stop = layout.span(home)
        part = join(blocks[block:]).part(start, stop)
        for row in range(int(layout.edges[home + 1] - layout.edges[home])):
            at = row * step + np.arange(width)
            found.append((part.tokens[at], *(each[0] for each in within(part.starts, at[None]))))
    for begin, (numbers, document, position) in zip(begins, found, strict=True):
        assert numbers.tolist() == list(range(begin, begin + width))
        own = owners[begin : begin + width]
        known = list(dict.fromkeys(own.tolist()))
        assert document.tolist() == [known.index(owner) for owner in own]
        assert position.tolist() == [int((own[:at] == own[at]).sum()) for at in range(width)]


# ---- files


def test_texts_as_nano_gpt_reads_them(tmp_path: Path) -> None:
    documents = corpus()
    write_texts(tmp_path / "data", documents)
    expected, _ = stream(documents)
    data = sp.data.tokens(tmp_path / "data", LENGTH, separator="\n\n", **LETTERS)
    assert len(data) == (len(expected) - 1) // LENGTH
    assert f"text between '\\n\\n', {len(expected):,} tokens" in data.describe()
    for number, (x, y) in enumerate(data):
        at = number * LENGTH
        assert x.tolist() == expected[at : at + LENGTH]
        assert y.tolist() == expected[at + 1 : at + LENGTH + 1]


def test_documents_keep_their_boundaries(tmp_path: Path) -> None:
    documents = corpus()
    write_texts(tmp_path / "data", documents)
    expected, owners = stream(documents)
    data = sp.data.tokens(tmp_path / "data", LENGTH, separator="\n\n", documents=True, **LETTERS)
    batch = next(iter(data.batch(len(data))))
    assert set(batch) == {"input_ids", "position_ids", "document_ids", "y"}
    for number in range(len(data)):
        at = number * LENGTH
        own = owners[at : at + LENGTH + 1]
        known = list(dict.fromkeys(own))
        labels = [expected[at + n + 1] if own[n] == own[n + 1] else -100 for n in range(LENGTH)]
        assert batch["input_ids"][number].tolist() == expected[at : at + LENGTH]
        assert batch["y"][number].tolist() == labels
        assert batch["document_ids"][number].tolist() == [known.index(o) for o in own[:LENGTH]]
        positions = [own[:n].count(own[n]) for n in range(LENGTH)]
        assert batch["position_ids"][number].tolist() == positions


def test_a_column_of_tokens_is_taken_as_it_is(tmp_path: Path, every_format: str) -> None:
    """Of each format; documents of one length, and of several."""
    write_all(tmp_path / "data", every_format, (23, 1, 40))
    (column,) = names(every_format, "tokens")
    expected = np.concatenate([tokens(number) for number in range(64)]).tolist()
    data = sp.data.tokens(tmp_path / "data", 10, column, for_transformers=True)
    batch = next(iter(data.batch(len(data))))
    assert batch["input_ids"].flatten().tolist() == expected[: len(data) * 10]
    assert (batch["labels"] == batch["input_ids"]).all()
    ended = sp.data.tokens(tmp_path / "data", 8, column, eos=63, for_transformers=True)
    found = torch.cat([example["input_ids"] for example in ended]).reshape(-1, 8)
    assert (found[:, 7] == 63).all()
    (text,) = names(every_format, "text")
    again = sp.data.tokens(tmp_path / "data", 10, text, **LETTERS)
    said, _ = stream([f"text {number}" for number in range(64)])
    assert torch.cat([x for x, _ in again]).tolist() == said[: len(again) * 10]


@pytest.fixture(params=["parquet", "webdataset", "jsonl", "mds"])
def every_format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_order_is_the_same_at_any_number_of_workers_and_resumes(tmp_path: Path) -> None:
    write_texts(tmp_path / "data", corpus())

    def made() -> sp.data.Dataset:
        data = sp.data.tokens(tmp_path / "data", LENGTH, separator="\n\n", **LETTERS)
        return data.shuffle(blocks=3).batch(10)

    alone = [batch.data[0].tolist() for batch in Loader(made(), seed=5)]
    plain = ids(
        iter(
            Loader(sp.data.tokens(tmp_path / "data", LENGTH, separator="\n\n", **LETTERS).batch(10))
        )
    )
    rows = [row for batch in alone for row in batch]
    assert sorted(rows) == sorted(plain)
    assert rows != plain
    for count in (1, 2, 3):
        for start in (0, 1, len(alone) - 1):
            found = []
            for index in range(count):
                loader = Loader(made(), (index, count), seed=5)
                loader.load_state_dict({"pass": 0, "step": start})
                found.append([batch.data[0].tolist() for batch in loader])
            joined = [[row for part in parts for row in part] for parts in zip(*found, strict=True)]
            assert joined == alone[start:]


def test_a_source_goes_to_another_process(tmp_path: Path) -> None:
    """As functions do that capture one (`sp.launch`)."""
    write_texts(tmp_path / "data", corpus())
    data = sp.data.tokens(tmp_path / "data", LENGTH, separator="\n\n", **LETTERS)
    again: Any = pickle.loads(pickle.dumps(data.source))
    found, expected = again[5], data.source[5]  # type: ignore[index]
    assert found[0].tolist() == expected[0].tolist()


def test_texts_that_change_in_use_are_refused_in_the_next_pass(tmp_path: Path) -> None:
    write_texts(tmp_path / "data", corpus())
    data = sp.data.tokens(tmp_path / "data", LENGTH, separator="\n\n", **LETTERS)
    before = len([*data])
    assert len([*data]) == before
    next((tmp_path / "data").iterdir()).write_text("more")
    with pytest.raises(UserError, match="was written after it was opened"):
        next(iter(data))


def test_texts_become_tokens_once(tmp_path: Path) -> None:
    calls = list[str]()

    def counted(text: str) -> list[int]:
        calls.append(text)
        return letters(text)

    documents = corpus()
    write_texts(tmp_path / "data", documents)
    options: dict[str, Any] = {**LETTERS, "tokenizer": counted, "separator": "\n\n"}
    first = [x.tolist() for x, _ in sp.data.tokens(tmp_path / "data", 16, **options)]
    assert sorted(calls) == sorted(document for document in documents if document)
    longer = sp.data.tokens(tmp_path / "data", 32, **options)
    assert [x.tolist() for x, _ in sp.data.tokens(tmp_path / "data", 16, **options)] == first
    assert len(list(longer.repeat(2))) == len(longer) * 2
    assert len(calls) == len(set(calls))
    (tmp_path / "data" / "1.txt").write_text("another")
    options["tokenizer_name"] = "bytes"
    sp.data.tokens(tmp_path / "data", 16, **options)
    assert calls.pop() == "another"
    assert len(calls) == len(set(calls))
    sp.data.tokens(tmp_path / "data", 16, **{**options, "tokenizer_name": "other bytes"})
    assert len(calls) > len(set(calls))


def windows_of_a_replica(folder: Path) -> tuple[list[str], list[list[int]]]:
    """The documents that this process has tokenized, and all windows."""
    calls = list[str]()

    def counted(text: str) -> list[int]:
        calls.append(text)
        return letters(text)

    options: dict[str, Any] = {**LETTERS, "tokenizer": counted, "separator": "\n\n"}
    data = sp.data.tokens(folder / "data", LENGTH, cache=folder / "shared", **options)
    return calls, [x.tolist() for x, _ in data]


def test_processes_that_begin_together_tokenize_each_text_once(
    tmp_path: Path, replicas: Replicas
) -> None:
    documents = corpus(200)
    write_texts(tmp_path / "data", documents, files=12)
    found = replicas(windows_of_a_replica, 2, tmp_path)
    calls = [text for each, _ in found for text in each]
    assert sorted(calls) == sorted(document for document in documents if document)
    assert found[0][1] == found[1][1]


def test_texts_elsewhere_are_fetched_once(tmp_path: Path) -> None:
    documents = corpus()
    write_texts(tmp_path / "data", documents)
    expected, _ = stream(documents)
    with serving(tmp_path / "data") as server:
        for _ in range(2):
            data = sp.data.tokens(f"{server.url}/{{0..2}}.txt", LENGTH, separator="\n\n", **LETTERS)
            found = [x.tolist() for x, _ in data.shuffle(1, blocks=2)]
        assert max(server.ranges.values()) == 1
    cut = [expected[n * LENGTH : (n + 1) * LENGTH] for n in range(len(data))]
    assert sorted(found) == sorted(cut)


# ---- text files


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_documents_of_text_files(
    newline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python's own files split, at any position of the blocks."""
    text = "\ufeffone\n\n\n\ntwo\nlines\n\n" + "three " * 200 + "\n\n \n\nfour\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline=newline)
    (tmp_path / "b.txt").write_text("")
    whole = list(sp.data.packed(tmp_path / "a.txt", "text"))
    assert whole == [text.removeprefix("\ufeff")]
    for target in (1, 7, 50, 10_000):
        monkeypatch.setattr(texts, "TARGET", target)
        format = texts.Texts(separator="\n\n")
        files, found = match_files(str(tmp_path), (".txt",))
        blocks = find_blocks(files, found, format, None)
        read = BlockFiles(files, format, blocks, None)
        documents = [d for b in range(len(blocks)) for d in read.load(b)["text"]]
        assert documents == ["one", "two\nlines", "three " * 200, "four\n"]
        assert blocks.edges[-1] == 4


def test_a_readme_beside_data_is_no_data(tmp_path: Path) -> None:
    write_all(tmp_path / "data", "parquet", (5,))
    (tmp_path / "data" / "LICENSE.txt").write_text("of the data")
    assert len(sp.data.packed(tmp_path / "data")) == 5
    with pytest.raises(UserError, match="several formats"):
        sp.data.packed(tmp_path / "data" / "*")


# ---- tokenizers


def test_tokenizers_of_transformers_are_asked_as_their_owner_would(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="dev: tokenizers")
    transformers = pytest.importorskip("transformers", reason="dev: transformers")
    documents = [document for document in corpus() if document]
    write_texts(tmp_path / "data", documents)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    trainer = tokenizers.trainers.BpeTrainer(special_tokens=["?", "<end>", "<begin>"])
    inner.train_from_iterator(documents, trainer)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<begin> $A", special_tokens=[("<begin>", 2)]
    )
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", pad_token="?"
    )
    expected = [t for text in documents for t in [*whole(text)["input_ids"], whole.eos_token_id]]
    options: dict[str, Any] = {"separator": "\n\n", "for_transformers": True}
    for _ in range(2):
        data = sp.data.tokens(tmp_path / "data", 16, tokenizer=whole, **options)
        found = torch.cat([example["input_ids"] for example in data]).tolist()
        assert found == expected[: len(found)]
        assert len(expected) - len(found) < 16
        whole(documents, truncation=True, max_length=2, padding=True)  # which the tokenizer keeps
    with pytest.raises(UserError, match="which token ends a document"):
        sp.data.tokens(tmp_path / "data", 16, tokenizer=inner, **options)
    plain = sp.data.tokens(tmp_path / "data", 16, tokenizer=inner, eos=None, **options)
    assert 1 not in torch.cat([example["input_ids"] for example in plain]).tolist()


def test_packed_documents_are_apart_in_a_model_of_transformers(tmp_path: Path) -> None:
    """Logits and loss of a window with ``position_ids`` are those of each document by itself."""
    transformers = pytest.importorskip("transformers", reason="dev: transformers")
    documents = [document for document in corpus() if document]
    write_texts(tmp_path / "data", documents)
    data = sp.data.tokens(
        tmp_path / "data", 64, separator="\n\n", documents=True, for_transformers=True, **LETTERS
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=256, use_cache=False, **sizes, **heads)
    net = transformers.LlamaForCausalLM(config).double().eval()
    batch = next(iter(data.batch(3)))
    with torch.no_grad():
        whole = net(**batch)
        summed, count = 0.0, 0
        for row, tokens in enumerate(batch["input_ids"]):
            begins = [*torch.where(batch["position_ids"][row] == 0)[0].tolist(), 64]
            for start, stop in pairwise(begins):
                alone = net(input_ids=tokens[None, start:stop]).logits[0]
                assert torch.allclose(whole.logits[row, start:stop], alone, atol=1e-12)
                losses = torch.nn.functional.cross_entropy(
                    alone[:-1], tokens[start + 1 : stop], reduction="sum"
                )
                summed, count = summed + float(losses), count + stop - start - 1
    assert float(whole.loss) == pytest.approx(summed / count, rel=1e-5)  # it is float32
    trainer = sp.Trainer(net)
    assert trainer.evaluate(data.batch(3), steps=1)["loss"] == pytest.approx(float(whole.loss))
    net.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="in a batch of one alone"):
        trainer.evaluate(data.batch(3))
    net.config.use_cache = True
    with pytest.raises(UserError, match="sees nothing of where documents begin"):
        trainer.evaluate(data.batch(3))
    mixed = sp.data.mix({"a": data, "b": data.shuffle(blocks=2)}, size=6)
    with pytest.raises(UserError, match="sees nothing of where documents begin"):
        trainer.evaluate(mixed.batch(3))


# ---- what is wrong


def test_documents_that_cannot_be_read_are_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"text": f"document {number}"} for number in range(30)]
    rows[7] = {"text": None}  # type: ignore[dict-item]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    sp.data.tokens(tmp_path / "a.jsonl", 8, **LETTERS)
    assert "1 of 30 documents cannot be read" in caplog.text
    assert "a.jsonl: block 0, number 7 is not there; they are left out" in caplog.text
    (tmp_path / "a.jsonl").write_text("\n".join(lines * 11))
    with pytest.raises(UserError, match="11 of 330 documents cannot be read"):
        sp.data.tokens(tmp_path / "a.jsonl", 8, **LETTERS)
    with pytest.raises(UserError, match=r"330 of 330 .* number 0 is not there"):
        sp.data.tokens(tmp_path / "a.jsonl", 8, "body", **LETTERS)


def table(folder: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return folder / "a.parquet"


def halves(text: str) -> list[float]:
    return [0.5]


Call = Callable[[Path], Any]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda f: sp.data.tokens(table(f, text=["a"]), 4), "Texts want a tokenizer"),
        (
            lambda f: sp.data.tokens(table(f, text=[[1, 2]]), 4, **LETTERS),
            r"a.parquet: the column 'text' has no texts: it has arrays of int64",
        ),
        (lambda f: sp.data.tokens(table(f, x=[[1, -2]]), 1, "x"), "a token is -2 in the column"),
        (lambda f: sp.data.tokens(table(f, x=[[1.0]]), 1, "x"), "it has arrays of float64"),
        (lambda f: sp.data.tokens(table(f, x=[[1, 2]]), 4, "x"), "has 2 tokens, too few"),
        (lambda f: sp.data.tokens(table(f, x=[[1, 2]]), 0, "x"), "at least one token"),
        (lambda f: sp.data.tokens(table(f, x=[[1]]), 4, "y"), "there is no column 'y'"),
        (
            lambda f: sp.data.tokens(table(f, x=["a"]), 4, "x", tokenizer=letters),
            r"tokenizer=letters has no name",
        ),
        (
            lambda f: sp.data.tokens(f, 4, tokenizer=letters, tokenizer_name="l"),
            "It is empty",
        ),
        (
            lambda f: sp.data.tokens(table(f, x=["a"]), 4, "x", **{**LETTERS, "eos": "tokenizer"}),
            "which token ends a document",
        ),
        (
            lambda f: sp.data.tokens(table(f, x=["a"]), 4, "x", separator="\n", **LETTERS),
            "Only text files have one",
        ),
        (lambda f: sp.data.tokens(f, 4, tokenizer="gpt2"), "is no tokenizer"),
        (
            lambda f: sp.data.tokens(table(f, text=["a"]), 1, **{**LETTERS, "tokenizer": halves}),
            "a.parquet: the tokenizer returns list of a text",
        ),
        (lambda f: sp.data.tokens(["a"], 4, **LETTERS), r"tokens\(\) of a list"),
    ],
)
def test_what_cannot_be_is_refused(call: Call, said: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match=said):
        call(tmp_path / "data")


def test_a_cache_that_is_too_small_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_texts(tmp_path / "data", corpus())
    monkeypatch.setenv("SPARTITO_CACHE_LIMIT", "1000")
    data = sp.data.tokens(tmp_path / "data", LENGTH, separator="\n\n", **LETTERS)
    assert "becomes tokens again in each pass" in caplog.text
    expected, _ = stream(corpus())
    assert torch.cat([x for x, _ in data]).tolist() == expected[: len(data) * LENGTH]


def test_texts_that_cannot_be_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(UserError, match=r"a.txt.gz' is compressed as a whole.*\n.*Unpack it"):
        sp.data.tokens(tmp_path / "a.txt.gz", 4, **LETTERS)
    (tmp_path / "b.txt").write_text("a long document\n" * 10)
    monkeypatch.setattr(texts, "LONGEST", 100)
    with pytest.raises(UserError, match=r"b.txt has a document of more than 0 MiB"):
        sp.data.tokens(tmp_path / "b.txt", 4, **LETTERS)
    with pytest.raises(UserError, match=r"b.txt has a document"):
        sp.data.tokens(tmp_path / "b.txt", 4, separator="\n\n", **LETTERS)
    assert len(sp.data.tokens(tmp_path / "b.txt", 4, separator="\n", **LETTERS)) == 39
    (tmp_path / "b.txt").write_bytes(b"a\n\xff\xff\n" * 12)
    with pytest.raises(UserError, match="number 1 is no UTF-8: byte 0 is 0xff"):
        sp.data.tokens(tmp_path / "b.txt", 4, separator="\n", **LETTERS)
