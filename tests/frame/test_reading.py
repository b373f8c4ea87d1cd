"""Nothing that is read runs code: a payload for each way in, and the list of what unpickles."""

import ast
import json
import math
import os
import pickle
import re
import socket
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from lessons.lesson08_fault_tolerance.experiments.resumable_runs import reference_training
from shared.clusters.addresses import Meeting, reach
from shared.clusters.report import Report, own_report, reports_of_all
from shared.errors import InputError, NoGroup
from shared.exercises.cells import code_of
from shared.fault_tolerance.elastic import load_elastic, save_elastic
from shared.ranks.forked import run_ranks
from shared.training.distributed_files import Reader
from shared.training.named_checkpoint import ModuleLayout, load_named, named_state, save_named
from shared.training.quiet_deepspeed import WEIGHTS_ONLY, load_deepspeed

ROOT = Path(__file__).resolve().parents[2]


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


@pytest.fixture
def ran(tmp_path):
    """The folder that a payload would make; it must not be there in the end."""
    folder = tmp_path / "ran"
    yield folder
    assert not folder.exists(), "the payload ran"


def saved(folder):
    """A model and its optimizer, saved in `folder`."""
    model = nn.Linear(3, 2)
    layout, optimizer = ModuleLayout(model), torch.optim.AdamW(model.parameters())
    save_named(layout, optimizer, folder)
    return layout, optimizer


def changed(folder, change):
    """Put another list of what is there in the place of a checkpoint's."""
    file = folder / ".metadata"
    found = Reader(folder).read_metadata()
    file.write_bytes(pickle.dumps(change(found)))


def somewhere_else(found):
    """Every tensor in a file outside of the folder."""
    places = found.storage_data
    places = {key: replace(each, relative_path="../other") for key, each in places.items()}
    return replace(found, storage_data=places)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda found, ran: Payload(ran), "it names posix.mkdir, which is not read"),
        (lambda found, ran: replace(found, planner_data=Payload(ran)), "posix.mkdir"),
        (lambda found, ran: Meeting, "it names shared.clusters.addresses.Meeting"),
        (lambda found, ran: {}, "no list of what"),
        (lambda found, ran: replace(found, storage_data=None), "no list of what"),
        (lambda found, ran: replace(found, state_dict_metadata={"model.weight": 1}), "no list"),
        (lambda found, ran: somewhere_else(found), "no list of what"),
    ],
)
def test_a_list_that_is_none_is_refused_in_one_line(tmp_path, ran, change, words):
    folder = tmp_path / "saved"
    layout, optimizer = saved(folder)
    changed(folder, partial(change, ran=ran))
    with pytest.raises(InputError, match=words) as caught:
        load_named(layout, optimizer, folder)
    assert "\n" not in str(caught.value)


NAMED = b"ctorch.distributed.checkpoint.metadata\n"
SETS = [
    (NAMED + b"Metadata\nN}V__init__\nNs\x86b.", "type"),
    (NAMED + b"_MEM_FORMAT_ENCODING\n(I0\ntR}V_value_\nI7\nsb.", "_MEM_FORMAT_ENCODING"),
    (b"ctorch.serialization\n_get_layout\n}V__doc__\nNsb.", "_?[a-z_]+"),
]


@pytest.mark.parametrize(("payload", "kind"), SETS, ids=["class", "enum", "function"])
def test_a_list_sets_nothing_of_torchs(tmp_path, monkeypatch, payload, kind):
    shared = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING(0)
    monkeypatch.setattr(dcp.Metadata, "__init__", before := dcp.Metadata.__init__)
    monkeypatch.setitem(vars(shared), "_value_", 0)
    folder = tmp_path / "saved"
    layout, optimizer = saved(folder)
    (folder / ".metadata").write_bytes(payload)
    with pytest.raises(InputError, match=f"it sets attributes of a {kind}") as caught:
        load_named(layout, optimizer, folder)
    assert "\n" not in str(caught.value)
    assert (dcp.Metadata.__init__, shared.value) == (before, 0)


def test_a_value_in_a_folder_of_names_does_not_run(tmp_path, ran):
    layout, optimizer = saved(tmp_path / "sound")
    state = named_state(layout, optimizer)
    dcp.save({**state, "step": Payload(ran)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(InputError, match="cannot be read"):
        load_named(layout, optimizer, tmp_path / "saved")


def test_an_elastic_folder_runs_nothing(tmp_path, ran):
    def load(rank, way):
        state, _ = reference_training()
        folder = save_elastic(tmp_path / way, state)
        if way == "list":
            (folder / ".metadata").write_bytes(pickle.dumps(Payload(ran)))
        else:
            dcp.save({"progress": Payload(ran)}, checkpoint_id=folder)
        with pytest.raises(InputError, match="cannot be loaded") as caught:
            load_elastic(tmp_path / way, state)
        return str(caught.value)

    for way in ("list", "value"):
        (words,) = run_ranks(load, 1, way)
        assert "\n" not in words
        assert "posix.mkdir" in words or "UnpicklingError" in words


@pytest.mark.full
def test_a_folder_of_deepspeeds_runs_nothing(tmp_path, ran):
    pytest.importorskip("deepspeed")
    scaler = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler").LossScaler(2.0)

    class Engine:
        def load_checkpoint(self, folder, tag):
            return torch.load(Path(folder, tag), weights_only=False)  # as DeepSpeed's does

    torch.save({"loss_scaler": scaler}, tmp_path / "own")
    torch.save({"loss_scaler": Payload(ran)}, tmp_path / "foreign")
    load_deepspeed(Engine(), tmp_path, "own")
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        load_deepspeed(Engine(), tmp_path, "foreign")
    assert WEIGHTS_ONLY not in os.environ


ENDLESS = json.dumps({each.name: math.inf for each in fields(Report)})
FOREIGN = ["", "\0", "[" * 10_000, "null", '{"rank": 0}', '["host"]', '["host", "port"]', "{}"]
FOREIGN += [ENDLESS, '["127.0.0.1", Infinity]', '["127.0.0.1", 65536]', f'["{"x" * 300}", 80]']


@pytest.mark.parametrize("entry", ["payload", *FOREIGN], ids=range(1 + len(FOREIGN)))
def test_a_foreign_entry_in_the_store_is_a_line(tmp_path, ran, entry):
    entry = pickle.dumps(Payload(ran)).hex() if entry == "payload" else entry
    meeting = Meeting(dist.HashStore(), 0, 2, patience=5.0)
    mine = own_report(0, torch.device("cpu"), tmp_path)
    for key in ("report_1", "door_1"):
        meeting.store.set(key, entry)
    for asked in (lambda: reports_of_all(meeting, mine), lambda: reach(meeting, "127.0.0.1")):
        with pytest.raises(NoGroup, match="nothing that a rank writes") as caught:
            asked()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("entry", ['"xx"', '["x"]', "[[], 1]", "2"])
def test_a_foreign_row_of_who_was_reached_is_a_line(entry):
    meeting = Meeting(dist.HashStore(), 0, 2, patience=5.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        meeting.store.set("door_1", json.dumps(other.getsockname()))
        meeting.store.set("reached_1", entry)
        with pytest.raises(NoGroup, match="'reached_1' in the store is nothing that a rank writes"):
            reach(meeting, "127.0.0.1")


def test_a_report_comes_back_from_the_store_as_it_was(tmp_path):
    meeting = Meeting(dist.HashStore(), 0, 2)
    mine = own_report(0, torch.device("cpu"), tmp_path)
    other = replace(mine, rank=1, variables={"NCCL_DEBUG": "INFO"})
    meeting.store.set("report_1", json.dumps(asdict(other)))
    assert reports_of_all(meeting, mine) == [mine, other]


# What unpickles, or runs text: every call of these has a row in CONTRIBUTING.
READS = re.compile(
    r"(pickle|marshal|dill|shelve|joblib)\.(load|loads|open|_?Unpickler)"
    r"|torch\.distributed\.checkpoint\.(load|FileSystemReader)|.+\.load_checkpoint|exec|eval"
)
WORDS = re.compile(
    r"pickle|marshal|dill|joblib|shelve|load\(|load as|Reader|_checkpoint\(|exec\(|eval\("
)


def reading(source):
    """What a source calls that can run what it reads, by the name where it is defined."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {a.asname: a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    for node in nodes:
        for each in node.names if isinstance(node, ast.ImportFrom) else ():
            if not each.name.endswith("load_checkpoint"):  # of its own class, a plain function
                names[each.asname or each.name] = f"{node.module}.{each.name}"

    def defined(node):
        head, dot, rest = ast.unparse(node).partition(".")
        return f"{names.get(head, head)}{dot}{rest}"

    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield from (name for each in node.bases if READS.fullmatch(name := defined(each)))
        if isinstance(node, ast.Call):
            name, given = defined(node.func), {each.arg: each.value for each in node.keywords}
            if READS.fullmatch(name) or "allow_pickle" in given:
                yield name
            if name == "torch.load" and ast.unparse(given.get("weights_only", node)) != "True":
                yield name


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(x)",
        "from pickle import loads\nloads(x)",
        "from pickle import loads as read\nread(x)",
        "import pickle as p\np.loads(x)",
        "from torch import load\nload(x, weights_only=False)",
        "import torch as t\nt.load(x)",
        "from torch.distributed import checkpoint as c\nc.load(x)",
        "import torch.distributed.checkpoint as dcp\ndcp.load(x)",
        "from pickle import Unpickler\nclass A(Unpickler): ...",
    ],
)
def test_what_unpickles_is_seen_however_it_is_imported(source):
    assert list(reading(source))
    assert not list(reading("from torch import load\nload(x, weights_only=True)"))


def sources():
    """Every module outside of the tests, and every notebook's code, as (path, source)."""
    tops = ("shared", "lessons", "solutions")
    modules = (path for top in tops for path in (ROOT / top).rglob("*.py"))
    for path in sorted((*modules, *(ROOT / "lessons").glob("*/lesson.ipynb"))):
        yield path.relative_to(ROOT).as_posix(), code_of(path)


def test_what_unpickles_stands_in_contributing():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## What unpickles")[2].partition("|---|")[2].partition("\n## ")[0]
    found = {path: set(reading(source)) for path, source in sources() if WORDS.search(source)}
    found = {path: called for path, called in found.items() if called}
    assert set(re.findall(r"`([\w/]+\.(?:py|ipynb))`", table)) == set(found), found
