"""Whatever stands in a file that is read: one of our own errors or a sound result, no hang, little memory.

Each reader gets files that are near right: a valid one with bytes changed, cut out or put in, or, of JSON, with any
value in the place of another. A few of each here, a hundred thousand by `make test-fuzz`.
"""

import hashlib
import json
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from megatron_allattn.checkpoint import folder, shards, universal
from megatron_allattn.checkpoint.compare import not_finite, pieces, places
from megatron_allattn.checkpoint.conversion import SavedRun, read_run
from megatron_allattn.checkpoint.header import ITEM_BYTES, TensorInfo, pack_header, read_header
from megatron_allattn.checkpoint.inspect import inspect
from megatron_allattn.checkpoint.manifest import MANIFEST, verify
from megatron_allattn.checkpoint.run_folder import Outcome, read_outcome
from megatron_allattn.checkpoint.tensors import DTYPE_NAMES, TensorReader
from megatron_allattn.cluster.nodes.checks import Check, table
from megatron_allattn.cluster.nodes.compare import judge, read_reports
from megatron_allattn.cluster.nodes.hostfile import MOST_SLOTS, read_hosts, written
from megatron_allattn.cluster.nodes.local import NodeReport
from megatron_allattn.config import ParallelConfig, RunConfig, UsageError
from megatron_allattn.data.indexed import IndexedReader, IndexedWriter
from megatron_allattn.data.tokenizers import CharTokenizer, WordTokenizer, tokenizer_from_file
from megatron_allattn.parallel.discovery import first_host
from tests.support.saved_runs import MODELS, saved_run

FEW, MANY = 100, 100_000
ROUND = 1000  # inputs by one seed: hypothesis keeps what it knows of all of them
MEMORY = 400 * 2**20  # that a thousand inputs, of at most some hundred bytes each, may cost

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", "../x", "/etc/passwd", "F32", 2**64, -1, 1e308, "0" * 200]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


@st.composite
def bytes_near(draw: Any, valid: bytes) -> bytes:
    """A file's bytes with some of them changed, removed or put in."""
    content = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        where = draw(st.integers(0, len(content)))
        kind = draw(st.sampled_from(["change", "remove", "insert", "cut", "number"]))
        if kind == "change" and where < len(content):
            content[where] = draw(st.integers(0, 255))
        elif kind == "remove":
            del content[where : where + draw(st.integers(1, 16))]
        elif kind == "insert":
            content[where:where] = draw(st.binary(max_size=16))
        elif kind == "cut":
            del content[where:]
        elif kind == "number":
            size = draw(st.sampled_from([1, 4, 8]))
            number = draw(st.sampled_from([0, 1, 2 ** (8 * size - 1) - 1, 2 ** (8 * size) - 1]))
            content[where : where + size] = number.to_bytes(size, "little")
    return bytes(content)


@st.composite
def json_near(draw: Any, valid: Any) -> Any:
    """A JSON value with others in some places."""
    content = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(1, 3))):
        places: list[tuple[Any, Any]] = []

        def walk(value: Any, places: list[tuple[Any, Any]] = places) -> None:
            keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
            for key in keys:
                places.append((value, key))
                walk(value[key])

        walk(content)
        if not places:
            return draw(values)
        parent, key = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(["replace", "remove", "add"]))
        if kind == "replace":
            parent[key] = draw(values)
        elif kind == "remove":
            del parent[key]
        elif isinstance(parent, dict):
            parent[draw(st.text(max_size=12))] = draw(values)
    return content


@contextmanager
def little_memory() -> Iterator[None]:
    """What maps much more memory than there is now gets a MemoryError, so that its input is found."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def fuzz(inputs: st.SearchStrategy[Any], read: Callable[[Any], object], count: int) -> None:
    """Read so many inputs; anything but a result or a UsageError fails, and so does an input that takes seconds."""

    for number in range(-(-count // ROUND)):

        @seed(number)
        @settings(max_examples=min(count, ROUND), deadline=5000, database=None, suppress_health_check=list(HealthCheck))
        @given(inputs)
        def attempt(one: Any) -> None:
            try:
                read(one)
            except UsageError as error:
                assert "\n" not in str(error) and len(str(error)) < 2000

        with little_memory():
            attempt()


def read_values(path: Path) -> None:
    """Every tensor is what the header says of it, or one that torch or this program does not know; numpy knows all."""
    reader, where = TensorReader.of_files(path), places({path.name: read_header(path)}, path.parent)
    for info, place in zip(reader.infos.values(), where.values(), strict=True):
        assert sum(len(piece) for piece in pieces(place)) * ITEM_BYTES[info.dtype] == info.num_bytes
        not_finite(place)
    for name, info in reader.infos.items():
        tensor = reader.read(name)
        assert (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) == (info.dtype, info.shape)


count_of_inputs = pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.fuzz)])
count_of_large_inputs = pytest.mark.parametrize("count", [FEW // 3, pytest.param(MANY, marks=pytest.mark.fuzz)])


@count_of_inputs
def test_token_index(tmp_path: Path, count: int) -> None:
    with IndexedWriter(tmp_path / "a", "u1") as writer:
        for size in (3, 0, 5):
            writer.add_sequence(np.arange(size, dtype="u1"))
            writer.end_document()
    index = tmp_path / "a.idx"

    def read(content: bytes) -> None:
        index.write_bytes(content)
        reader = IndexedReader(tmp_path / "a")
        assert sum(len(one) for document in reader.documents() for one in document) == reader.num_tokens == 8

    fuzz(bytes_near(index.read_bytes()), read, count)


@count_of_inputs
def test_safetensors_header(tmp_path: Path, count: int) -> None:
    path = tmp_path / "a.safetensors"
    tensors = [TensorInfo("a", "F32", (2, 3), 24), TensorInfo("b", "U8", (), 1), TensorInfo("c", "BF16", (0, 4), 0)]
    valid = pack_header(tensors, {"format": "pt"}) + bytes(25)

    def read(content: bytes) -> None:
        path.write_bytes(content)
        assert sum(info.num_bytes for info in read_header(path)) <= len(content)
        read_values(path)

    read(valid)
    fuzz(bytes_near(valid), read, count)


@count_of_inputs
def test_safetensors_header_of_other_values(tmp_path: Path, count: int) -> None:
    path = tmp_path / "a.safetensors"
    valid = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "U8", "shape": [], "data_offsets": [24, 25]},
    }

    def read(entries: Any) -> None:
        text = json.dumps(entries).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(25))
        assert sum(info.num_bytes for info in read_header(path)) <= 25
        read_values(path)

    read(valid)
    empty = {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [25, 25]}  # sound, but not for torch
    with pytest.raises(UsageError, match=r"which torch cannot hold"):
        read(valid | {"c": empty})
    for dtype, size in ITEM_BYTES.items():
        one = {"dtype": dtype, "shape": [24 // size], "data_offsets": [0, 24]}
        if dtype in DTYPE_NAMES.values():
            read(valid | {"a": one})
        else:
            with pytest.raises(UsageError, match=rf"tensor a is of type {dtype}, which is not read here"):
                read(valid | {"a": one})
    fuzz(json_near(valid), read, count)


def a_step(run: Path) -> Path:
    """A complete one, of one file."""
    temporary = folder.begin(run, 3)
    (temporary / "state.json").write_text("{}")
    return folder.commit(temporary, 3)


def write_manifest(step: Path, content: bytes) -> None:
    """And a marker that fits."""
    (step / MANIFEST).write_bytes(content)
    (step / folder.MARKER).write_text(hashlib.sha256(content).hexdigest())


@count_of_inputs
def test_manifest(tmp_path: Path, count: int) -> None:
    """Its marker fits, whatever stands in it; nothing outside its folder is looked at."""
    step = a_step(tmp_path)
    (tmp_path / "checkpoints" / "outside").write_text("{}")
    valid = json.loads((step / MANIFEST).read_text())
    outside = {"files": {"../outside": {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}}}

    def read(content: Any) -> None:
        write_manifest(step, json.dumps(content).encode())
        assert set(verify(step)["files"]) <= {"state.json"}

    with pytest.raises(UsageError, match=r"expected names of files in this folder, found '\.\./outside'"):
        read(valid | outside)
    fuzz(json_near(valid), read, count)


@count_of_inputs
def test_manifest_of_other_bytes(tmp_path: Path, count: int) -> None:
    step = a_step(tmp_path)

    def read(content: bytes) -> None:
        write_manifest(step, content)
        verify(step)

    fuzz(bytes_near((step / MANIFEST).read_bytes()), read, count)


@count_of_inputs
def test_outcome(tmp_path: Path, count: int) -> None:
    Outcome(how="guard", step=7, reason="5 steps in a row").write(tmp_path)
    path = tmp_path / "outcome.json"
    valid = json.loads(path.read_text())

    def read(content: Any) -> None:
        path.write_text(json.dumps(content))
        found = read_outcome(tmp_path)
        assert found is not None and found.how in ("done", "stopped", "guard", "failed")
        assert found.step is None or type(found.step) is int

    read(valid)
    fuzz(json_near(valid), read, count)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return saved_run(tmp_path_factory.mktemp("saved") / "run", MODELS["fixed"])


def check_whole(found: SavedRun) -> None:
    """Whatever a conversion or a run takes from a state."""
    assert (found.state["step"], found.state["vocab_size"]) >= (0, 1)
    assert 0 <= found.progress.skipped <= found.state["step"] and found.run.model.num_layers > 0


@count_of_large_inputs
@pytest.mark.parametrize("kind", ["values", "bytes"])
def test_state(tmp_path: Path, saved: SavedRun, count: int, kind: str) -> None:
    """In a folder whose manifest fits: a run's, and one that is looked at by tools/inspect_checkpoint.py."""
    temporary = folder.begin(tmp_path, 2)
    valid = (saved.step_folder / "state.json").read_bytes()
    (temporary / "state.json").write_bytes(valid)
    weights = saved.step_folder / "weights-00001.safetensors"
    (temporary / weights.name).write_bytes(weights.read_bytes())
    step = folder.commit(temporary, 2)
    manifest = json.loads((step / MANIFEST).read_text())

    def read(content: bytes) -> None:
        (step / "state.json").write_bytes(content)
        entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        text = json.dumps(manifest | {"files": manifest["files"] | {"state.json": entry}}).encode()
        (step / MANIFEST).write_bytes(text)
        (step / folder.MARKER).write_text(hashlib.sha256(text).hexdigest())
        json.dumps(inspect(step).to_dict())
        check_whole(read_run(step))

    read(valid)
    with pytest.raises(UsageError, match=r"state.json: is not JSON"):
        read(b'{"step": 2, "a": ' + b"[" * 100_000)
    near = json_near(json.loads(valid)).map(lambda content: json.dumps(content).encode())
    fuzz(near if kind == "values" else bytes_near(valid), read, count)


@count_of_large_inputs
def test_layout_of_shards(tmp_path: Path, saved: SavedRun, count: int) -> None:
    """The description in it, the grid and the list of tensors; the tensors are there, but are not read."""
    shards.write(saved, tmp_path / "out", ParallelConfig(tensor_model_parallel_size=2))
    path = tmp_path / "out" / shards.LAYOUT
    valid = json.loads(path.read_bytes())

    def read(content: Any) -> None:
        path.write_text(json.dumps(content))
        found = shards.describe(tmp_path / "out")
        assert 0 <= found.progress.skipped <= found.step and found.vocab_size > 0

    read(valid)
    fuzz(json_near(valid), read, count)


@count_of_inputs
def test_latest_of_a_universal_checkpoint(tmp_path: Path, count: int) -> None:
    """It names a folder beside it, and no other."""

    def read(content: bytes) -> None:
        (tmp_path / universal.LATEST).write_bytes(content)
        named = universal.latest(tmp_path)
        assert named.parent == tmp_path and named.resolve() == named and named.name.startswith("global_step")

    read(b"global_step100_universal\n")
    parts = st.sampled_from(
        [b"global_step", b"_universal", b"1", b"..", b".", b"/", b"\n", b"\0", b"\xb9", b"x" * 2000]
    )
    fuzz(bytes_near(b"global_step100_universal") | st.lists(parts, max_size=6).map(b"".join), read, count)


@count_of_inputs
def test_configuration(count: int) -> None:
    fuzz(json_near(RunConfig().to_dict()), RunConfig.from_dict, count)


@count_of_inputs
@pytest.mark.parametrize("valid", [CharTokenizer(["a", "b", "é"]), WordTokenizer(["the", "<eos>", "<unk>", "of"])])
def test_tokenizer_file(tmp_path: Path, valid: Any, count: int) -> None:
    path = tmp_path / "vocabulary.json"

    def read(content: Any) -> None:
        path.write_text(json.dumps(content))
        tokenizer = tokenizer_from_file(path)
        assert tokenizer.vocab_size > 0 and isinstance(tokenizer.decode([0]), str | bytes)

    fuzz(json_near(valid.to_json()), read, count)


@count_of_inputs
def test_tokenizer_file_of_other_bytes(tmp_path: Path, count: int) -> None:
    path = tmp_path / "vocabulary.json"

    def read(content: bytes) -> None:
        path.write_bytes(content)
        tokenizer_from_file(path)

    fuzz(bytes_near(json.dumps(CharTokenizer(["a", "b"]).to_json()).encode()), read, count)


@count_of_inputs
def test_node_list(count: int) -> None:
    """SLURM's, of which the first host is taken."""

    def read(text: str) -> None:
        host = first_host(text)
        assert host and not set(host) & set("[], \t\n")

    parts = st.sampled_from(
        ["gpu", "n", "[", "]", "001", "1", "-", ",", " ", ".x", "login1", "[007-009,12]", "\n", "é"]
    )
    fuzz(st.lists(parts, max_size=12).map("".join) | st.text(max_size=30), read, count)


@count_of_inputs
def test_node_report(tmp_path: Path, count: int) -> None:
    """What a node has left, which the first one puts beside the others' and prints."""
    check = Check(name="devices", node="n1", status="fault", found="7", asked="8", way_out="see nvidia-smi")
    path = NodeReport(node="n1", checks=(check,), facts={"python": "3.11"}, time=1.5).write(tmp_path)
    valid = json.loads(path.read_text())

    def read(content: Any) -> None:
        path.write_text(json.dumps(content))
        judgement = judge(read_reports(tmp_path), ["n1", "n2"])
        assert "\x1b" not in table(judgement.checks, 2) and not judgement.go

    fuzz(json_near(valid), read, count)


@count_of_inputs
def test_hostfile(tmp_path: Path, count: int) -> None:
    """Nothing in it reaches a shell: what is accepted is hosts and numbers."""
    path = tmp_path / "hosts"
    name = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

    def read(content: bytes) -> None:
        path.write_bytes(content)
        hosts = read_hosts(path)
        assert hosts and all(name.fullmatch(host.name) and 0 < host.slots <= MOST_SLOTS for host in hosts)
        assert len(hosts) == sum(
            b"slots=" in line and not line.strip().startswith(b"#") for line in content.split(b"\n")
        )
        again = tmp_path / "again"
        again.write_text(written(hosts, "deepspeed"))
        assert read_hosts(again) == hosts

    words = [
        "node1",
        "slots=",
        "slots=8",
        "=",
        " ",
        "\t",
        "\n",
        "0",
        "#",
        "$(touch canary)",
        "`touch canary`",
        ";",
        "-o",
        "\r",
    ]
    lines = st.lists(st.sampled_from([word.encode() for word in words]), max_size=8).map(b"".join)
    fuzz(lines | bytes_near(b"# two hosts\nnode1 slots=8\nnode-2.x slots=04\n"), read, count)
