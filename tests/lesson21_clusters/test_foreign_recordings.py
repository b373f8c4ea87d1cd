"""What other people bring: NCCL's dumps as torch writes them, and the watchdog's lines in a log."""

import json
import pickle
import re
import textwrap
from pathlib import Path

import pytest

from lessons.lesson21_clusters.beside_torch import mismatches, torchs_words
from shared.clusters.dumps import rank_in_name, read_dump, read_dumps, recordings_of
from shared.clusters.hangs import compared, explain_hang
from shared.clusters.recordings import from_dump
from shared.clusters.verdicts import describe_hang
from shared.clusters.watchdog import read_log
from shared.errors import InputError
from shared.exercises.lessons import ROOT

EXPLAIN = ROOT / "lessons" / "lesson21_clusters" / "explain.py"
PACKAGES = "/opt/conda/lib/python3.10/site-packages"
TORCH = f"{PACKAGES}/torch/distributed/distributed_c10d.py"


def entry(name, number, sizes=((4,),), *, group="0", state="completed", record=0, **more):
    """An entry as NCCL's flight recorder writes it, in version 2.10."""
    sizes = [list(size) for size in sizes]
    return {
        "profiling_name": f"nccl:{name}", "state": state, "process_group": (group, "default_pg"),
        "input_sizes": sizes, "output_sizes": sizes, "input_dtypes": ["Float"] * len(sizes),
        "output_dtypes": ["Float"] * len(sizes), "collective_seq_id": number, "p2p_seq_id": 0,
        "is_p2p": False, "record_id": record, "time_created_ns": 0, "frames": [],
    } | more  # fmt: skip


def message(name, number, size=8, **more):
    return entry(name, 0, ((size,),), is_p2p=True, p2p_seq_id=number, **more)


def dumps_of(by_rank, groups=None):
    groups = groups or {"0": tuple(range(len(by_rank)))}
    config = {
        name: {"name": name, "desc": "default_pg", "ranks": str(list(ranks))}
        for name, ranks in groups.items()
    }
    return {
        rank: {
            "version": "2.10",
            "pg_config": {n: each for n, each in config.items() if rank in groups[n]},
            "entries": entries,
        }
        for rank, entries in enumerate(by_rank)
    }


def found_in(by_rank, groups=None):
    hangs = explain_hang(recordings_of(dumps_of(by_rank, groups)))
    return [(h.group, h.number, h.missing, h.odd, h.stuck) for h in hangs]


# Names as torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp has them; rank 2 has another size.
SAME_ON_ALL = (
    "all_reduce", "allreduce_coalesced", "all_gather", "_all_gather_base", "all_gather_single",
    "all_gather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base", "gather",
    "reduce_scatter_tensor_coalesced", "reduce_scatter_single", "broadcast", "_broadcast_oop",
    "reduce", "_reduce_oop", "scatter",
)  # fmt: skip
UNEVEN = ("all_to_all", "all_to_all_single", "all_to_all_v_single", "all_gather_v", "alltoall_base")


@pytest.mark.parametrize("name", SAME_ON_ALL)
def test_sizes_are_compared_under_all_of_nccls_names(name):
    ranks = [[entry(name, 1), entry(name, 2, ((90 if r == 2 else 100,),))] for r in range(3)]
    assert found_in(ranks) == [("0", 2, (), (2,), ())]


@pytest.mark.parametrize("name", UNEVEN)
def test_sizes_that_may_differ_are_not_compared(name):
    assert found_in([[entry(name, 1, ((r,),))] for r in range(3)]) == []


def test_a_roots_side_of_gather_and_scatter_is_its_own():
    root, other = {"output_sizes": [[2, 4]]}, {"output_sizes": [], "output_dtypes": []}
    assert found_in([[entry("gather", 1, **root)], [entry("gather", 1, **other)]]) == []
    root, other = {"input_sizes": [[2, 4]]}, {"input_sizes": [], "input_dtypes": []}
    assert found_in([[entry("scatter", 1, **root)], [entry("scatter", 1, **other)]]) == []


def test_tensors_of_one_call_are_compared_one_by_one():
    both = [[entry("allreduce_coalesced", 1, sizes)] for sizes in (((10,), (20,)), ((20,), (10,)))]
    assert found_in(both) == [("0", 1, (), (0, 1), ())]


def test_a_message_that_nobody_receives_waits_for_the_rank_that_should():
    sent = [message("send 0->1", i) for i in (1, 2, 3)]
    got = [message("recv 1<-0", i) for i in (1, 2)]
    assert found_in([sent, got]) == [("0 from rank 0 to 1", 3, (1,), (), ())]
    assert found_in([sent[:2], got]) == []
    assert found_in([sent[:2], [got[0], message("recv 1<-0", 2, 9)]])[0][3] == (0, 1)


def test_messages_are_numbered_by_pair_and_ranks_of_a_group_are_the_jobs():
    # A stage in the middle counts what it gets and what it sends together; its batch ends with one
    # more entry. In the group ("7"), rank 2 of the job is rank 1.
    group = {"group": "7"}
    middle = [
        message("recv 1<-0", 1, **group), message("send 1->2", 2, **group),
        message("coalesced", 2, **group), message("recv 1<-0", 3, **group),
    ]  # fmt: skip
    ranks = [
        [message("send 0->1", i, **group) for i in (1, 2)], [], middle, [],
        [message("recv 2<-1", i, **group) for i in (1, 2)],
    ]  # fmt: skip
    assert found_in(ranks, {"7": (0, 2, 4)}) == [("7 from rank 2 to 4", 2, (2,), (), ())]


def test_nccl_runs_ahead_and_the_state_says_who_never_came_back():
    def rank(late):
        states = ("completed", "scheduled" if late else "completed", "scheduled")
        return [entry("all_reduce", 20 + i, state=s, record=i) for i, s in enumerate(states)]

    hangs = explain_hang(recordings_of(dumps_of([rank(False), rank(False), rank(True)])))
    assert [(h.number, h.missing, h.odd, h.stuck) for h in hangs] == [(21, (), (), (2,))]
    assert "no. 21 came back on the others, not on rank 2" in describe_hang(hangs[0])
    nobody = recordings_of(dumps_of([rank(True)] * 3))
    assert explain_hang(nobody) == []
    assert compared(nobody) == [
        "group 0 of ranks 0, 1, 2: calls no. 20 to 22, recorded on ranks 0, 1, 2; no. 21 came back"
        " on no rank"
    ]


def test_ranks_that_ran_ahead_by_different_numbers_accuse_nobody():
    """All hang in no. 21; rank 1's CPU waited for a result, and made fewer calls after it."""

    def rank(made):
        states = {20: "completed"}
        return [entry("all_reduce", n, state=states.get(n, "scheduled")) for n in range(20, made)]

    assert found_in([rank(26), rank(23), rank(26)]) == []
    assert verdicts(watchdog(0, 21, 25, 20) + watchdog(1, 21, 22, 20)) == []


def test_only_the_end_of_a_batch_knows_whether_it_came_back():
    def parts(state):  # torch writes no events down for what is inside
        inside = [entry("broadcast", 3, state="scheduled"), entry("broadcast", 3, ((9,),))]
        return [*inside, entry("coalesced", 3, state=state), entry("all_reduce", 4, state=state)]

    assert found_in([parts("completed")] * 2) == []
    assert found_in([parts("completed"), parts("scheduled")])[0][4] == (1,)

    def batch(name, state):
        inside = [message(name, 1, state="scheduled"), message("coalesced", 1, state=state)]
        return [*inside, message(name, 2, state=state)]

    assert found_in([batch("send 0->1", "completed"), batch("recv 1<-0", "completed")]) == []
    (found,) = found_in([batch("send 0->1", "completed"), batch("recv 1<-0", "scheduled")])
    assert found == ("0 from rank 0 to 1", 1, (), (), (1,))


def test_calls_that_travel_as_one_are_compared_part_by_part():
    def rank(second):
        parts = [entry("_broadcast_oop", 1, ((16,),)), entry("_broadcast_oop", 1, ((second,),))]
        return [*parts, entry("ALLGATHER_coalesced", 1, ((0,),))]

    (hang,) = explain_hang(recordings_of(dumps_of([rank(25), rank(16), rank(16)])))
    assert (hang.number, hang.odd) == (1, (0,))
    assert hang.what == "broadcast_oop of 16 float32, part 2"
    assert "rank 0 made broadcast_oop of 25 float32, part 2" in describe_hang(hang)


def test_two_groups_of_one_name_are_two_groups():
    calls = [[entry("all_reduce", i, group="1") for i in range(1, n + 1)] for n in (2, 1, 2, 2)]
    dumps = dumps_of(calls[:2], {"1": (0, 1)}) | {
        rank + 2: each for rank, each in dumps_of(calls[2:], {"1": (0, 1)}).items()
    }
    for rank in (2, 3):
        dumps[rank]["pg_config"]["1"]["ranks"] = "[2, 3]"
    hangs = explain_hang(recordings_of(dumps))
    assert [(h.number, h.missing) for h in hangs] == [(2, (1,))]


def test_numbers_as_text_and_the_older_versions_of_the_format_are_read():
    as_text = [entry("all_reduce", str(i), input_dtypes="float32") for i in (1, 2)]
    assert found_in([as_text, as_text[:1]]) == [("0", 2, (1,), (), ())]
    old = [entry("all_reduce", i) | {"seq_id": i} for i in (1, 2)]  # torch 2.2
    for each in old:
        for key in ("collective_seq_id", "p2p_seq_id", "is_p2p", "process_group"):
            del each[key]
        each["pg_id"] = 0
    dumps = {rank: {"entries": old[: 2 - rank]} for rank in (0, 1)}
    assert [h.missing for h in explain_hang(recordings_of(dumps))] == [(1,)]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("node1.rank_3.pickle", 3),
        ("rank_0_of_8", 0),
        ("trace-12-rank3-node1", 3),
        ("run7.fr_1", 1),
        ("run.fr_0", 0),
        ("nccl_trace_rank_2.json", 2),
    ],
)
def test_the_rank_in_a_files_name(name, rank):
    assert rank_in_name(Path(name)) == rank


def test_sizes_without_types_and_a_bare_list_are_compared(tmp_path):
    calls = [entry("all_reduce", 1, ((size,),)) for size in (100, 100, 90)]
    for rank, each in enumerate(calls):
        del each["input_dtypes"], each["output_dtypes"]
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps([each]))
    (hang,) = explain_hang(recordings_of(read_dumps(tmp_path.iterdir())))
    assert hang.odd == (2,)


def test_a_full_buffer_accuses_nobody_of_what_it_lost():
    """One buffer for all groups: a call of all by four ranks, then 30 in a group of two."""
    world = entry("all_reduce", 1, record=0)
    few = [entry("all_reduce", i, group="2", record=i) for i in range(1, 6)]
    many = [entry("all_reduce", i, group="3", record=i) for i in range(11, 31)]
    groups = {"0": (0, 1, 2, 3), "2": (0, 1), "3": (2, 3)}
    ranks = [[world, *few], [world, *few], many, many]
    assert found_in(ranks, groups) == []
    lines = compared(recordings_of(dumps_of(ranks, groups)))
    assert lines[0].endswith("; unknown: ranks 2, 3, whose full buffer has lost its calls")
    lost_nothing = [{**each, "record_id": i} for i, each in enumerate(many)]
    assert found_in([*ranks[:2], lost_nothing, many], groups)[0] == ("0", 1, (2,), (), ())


def test_a_full_recording_says_nothing_of_messages_and_of_a_call_that_is_cut():
    sent = [message("send 0->1", i, record=i) for i in (5, 6, 7)]
    assert found_in([sent, [message("recv 1<-0", 1)]]) == []
    cut = [entry("coalesced", 3, record=9), entry("all_reduce", 4, record=10)]
    whole = [entry("broadcast", 3), entry("coalesced", 3), entry("all_reduce", 4)]
    assert found_in([cut, whole]) == []


@pytest.mark.parametrize(
    ("files", "at"),
    [
        ((TORCH, f"{PACKAGES}/typing_extensions.py", "/data/job/a.py"), "a.py:2 in f"),
        ((TORCH, "/opt/conda/lib/python3.10/contextlib.py", "/w/torch/a.py"), "a.py:2 in f"),
        ((TORCH, f"{PACKAGES}/megatron/a.py", "/usr/lib/python3.10/runpy.py"), "a.py:1 in f"),
        ((TORCH,), "?"),
    ],
)  # fmt: skip
def test_a_call_is_at_the_users_line(files, at):
    frames = [{"name": "f", "filename": file, "line": i} for i, file in enumerate(files)]
    read = from_dump(0, {"entries": [entry("all_reduce", 1, frames=frames)]}, {"0": (0, 1)})
    assert read.calls[0].at == at


def folder_of(path, by_rank, name="nccl_trace_rank_{}", write=pickle.dumps):
    path.mkdir()
    for rank, dump in dumps_of(by_rank).items():
        (path / name.format(rank)).write_bytes(write(dump))
    return path


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("nccl_trace_rank_{}", pickle.dumps),
        ("comm_lib_trace_rank_{}", pickle.dumps),
        ("job7_rank{}.pickle", pickle.dumps),
        ("rank_{}.json", lambda dump: json.dumps(dump).encode()),
    ],
)
def test_a_folder_of_dumps_is_read_as_it_lies(name, write, tmp_path, run_script):
    calls = [entry("_all_gather_base", i) for i in (1, 2, 3)]
    folder = folder_of(tmp_path / "dumps", [calls, calls, calls[:2]], name, write)
    (folder / "readme.txt").write_text("written at 3 a.m.")
    assert explain_hang(recordings_of(read_dumps(folder.glob("*rank*"))))[0].missing == (2,)
    if write is pickle.dumps and name.startswith("nccl"):
        status, out, _ = run_script(EXPLAIN, folder)
        assert status == 1
        assert "group 0: all_gather_base of 4 float32 no. 3 waits for rank 2" in out
        assert "torch's analyzer: missing ranks: {2}" in out
        assert "not read: readme.txt" in out


def test_of_a_folder_of_other_things_it_names_the_first_damaged_dumps_before_them(
    tmp_path, run_script
):
    for rank in (0, 1):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(b"cut off")
    for number in range(500):
        (tmp_path / f"a{number}.txt").write_text("nothing of a rank's")
    status, _, words = run_script(EXPLAIN, tmp_path)
    assert status == 2
    assert len(words.splitlines()) == 1 and len(words) < 1000
    assert re.findall(r"not read: \S*nccl_trace_rank_(\d)", words) == ["0", "1"]
    assert words.rstrip().endswith(f"and {502 - 10} more")


def test_an_empty_answer_says_what_was_compared(tmp_path, run_script):
    calls = [entry("all_to_all", i, state="scheduled") for i in (1, 2)]
    status, out, _ = run_script(EXPLAIN, folder_of(tmp_path / "dumps", [calls, calls]))
    assert status == 0
    assert "alike on all ranks" in out
    assert "calls no. 1 to 2, recorded on ranks 0, 1; no. 1 came back on no rank" in out


def test_a_dump_that_was_not_brought_is_named(tmp_path, run_script):
    folder = folder_of(tmp_path / "dumps", [[entry("all_reduce", 1)]] * 3)
    for rank in (1, 2):
        next(folder.glob(f"*{rank}*")).unlink()
    (folder / "node.log").write_text(watchdog(0, 21, 22, 20))
    out = run_script(EXPLAIN, folder).out
    assert "no dump of ranks 1, 2: they died, or theirs was not brought" in out
    assert "logs lie there as well" in out
    (folder / "nccl_trace_rank_0").write_bytes(pickle.dumps({"entries": []}))  # it had just begun
    out = run_script(EXPLAIN, folder).out
    assert "no. 20 to 22, recorded on rank 0" in out
    assert "no call in the dumps of rank 0" in out


class Evil:
    def __reduce__(self):
        return print, ("this was run",)


def test_a_dump_is_data_and_runs_nothing(tmp_path, capsys):
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps({"entries": [Evil()]}))
    with pytest.raises(InputError, match=r"wants to call builtins\.print"):
        read_dump(path)
    assert "was run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "no dump"), (b"{}", "no dump"), (b"\x80\x04K\x05.", "no dump"), (None, "not there")],
)
def test_what_is_no_dump_is_one_line(content, words, tmp_path, run_script):
    path = tmp_path / "nccl_trace_rank_0"
    if content is not None:
        path.write_bytes(content)
    status, _, err = run_script(EXPLAIN, path)
    assert status == 2
    assert len(err.strip().splitlines()) == 1
    assert words in err


def test_torchs_analyzer_stops_with_a_word_where_it_cannot_read():
    (line,) = torchs_words(dumps_of([[entry("invented", 1)]] * 2), [0, 1])
    assert line.startswith("error msg: it stops with AssertionError")


def watchdog(rank, number, made, back, op="ALLREDUCE", numel=7, group="0(default_pg)"):
    """A rank's lines at a time-out, as torch 2.9 writes them."""
    place = f"[rank{rank}]:[E1128 17:05:38.1 ProcessGroupNCCL.cpp"
    work = f"WorkNCCL(SeqNum={number}, OpType={op}, NumelIn={numel}, NumelOut={numel}, "
    return (
        f"{place}:632] [Rank {rank}] Watchdog caught collective operation timeout: {work}"
        "Timeout(ms)=600000) ran for 600007 milliseconds before timing out.\n"
        f"{place}:2271] [PG ID 0 PG GUID {group} Rank {rank}]  failure detected by watchdog at "
        f"work sequence id: {number} PG status: last enqueued work: {made}, last completed work: "
        f"{back}\n"
    )


def asked(rank, made, back):
    """What a rank writes that timed out in nothing."""
    return (
        f"[rank{rank}]:[E1128 17:05:38.4 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) "
        f"Rank {rank}] Received a dump signal due to a collective timeout from  rank 0 and we will "
        f"try our best to dump the debug info. Last enqueued NCCL work: {made}, last completed "
        f"NCCL work: {back}.This is most likely caused by incorrect usages of collectives\n"
    )


def verdicts(log):
    return [(h.number, h.missing, h.odd, h.stuck) for h in explain_hang(read_log(log)[0])]


def test_a_log_of_several_ranks_says_who_did_not_make_the_call():
    log = "step 20: loss 3.2\n" + watchdog(0, 21, 22, 20) + watchdog(1, 21, 22, 20)
    log += asked(0, 22, 20) + asked(2, 20, 20)
    (hang,) = explain_hang(read_log(log)[0])
    assert (hang.group, hang.number, hang.missing) == ("0", 21, (2,))
    assert describe_hang(hang).startswith("allreduce of 7 no. 21 waits for rank 2")
    wrapped = "\n".join(textwrap.fill(line, 60) for line in log.splitlines())
    assert verdicts(wrapped) == verdicts(log)


@pytest.mark.parametrize(
    ("of_rank_2", "verdict"),
    [
        (watchdog(2, 21, 22, 20), []),
        (watchdog(2, 21, 22, 20, "_ALLGATHER_BASE"), [(21, (), (2,), ())]),
        (watchdog(2, 21, 22, 20, numel=8), [(21, (), (2,), ())]),
        (asked(2, 22, 22), [(21, (), (), (0, 1))]),
        (asked(2, -1, -1), [(1, (2,), (), ())]),
        (watchdog(2, 5, 5, 4, group="9(TP)"), []),  # of another group
    ],
)
def test_the_watchdogs_lines_give_the_verdict_that_dumps_give(of_rank_2, verdict):
    assert verdicts(watchdog(0, 21, 22, 20) + watchdog(1, 21, 22, 20) + of_rank_2) == verdict


@pytest.mark.parametrize("op", ["SEND", "COALESCED"])
def test_numbers_that_count_messages_accuse_no_stage_of_a_pipeline(op):
    log = watchdog(0, 9, 9, 8, op) + watchdog(1, 17, 17, 16, op) + watchdog(2, 9, 9, 8, op)
    assert verdicts(log) == []
    assert any("count messages, and are not compared" in note for note in read_log(log)[1])


def test_a_rank_that_times_out_in_two_groups_has_a_call_in_each():
    """Of equal numbers; and torch says each call again when the watchdog's thread ends."""
    log = ""
    for rank, op in enumerate(("_ALLGATHER_BASE", "ALLREDUCE")):
        first, second = watchdog(rank, 21, 22, 20), watchdog(rank, 21, 22, 20, op, group="1(TP)")
        log += first + first.splitlines()[1] + "\n" + second + first.splitlines()[0] + "\n"
    hangs, notes = explain_hang(read_log(log)[0]), read_log(log)[1]
    assert [(hang.group, hang.number, hang.odd) for hang in hangs] == [("1", 21, (0, 1))]
    assert notes == []


def test_a_log_of_two_starts_is_read_from_the_last():
    first = watchdog(0, 101, 101, 100) + watchdog(1, 101, 101, 100)
    assert verdicts(first + "".join(watchdog(rank, 5, 5, 4) for rank in range(3))) == []


def test_older_forms_of_the_watchdogs_lines_are_read():
    """torch 2.1 to 2.6: no name of the group, or its number, and the words "NCCL work"."""
    form = (
        "[Rank {r}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=21, "
        "OpType=_REDUCE_SCATTER_BASE, NumelIn=8, NumelOut=4, Timeout(ms)=600000) ran\n"
        "{group}[Rank {r}] Exception (either an error or timeout) detected by watchdog at work: "
        "21, last enqueued NCCL work: 23, last started NCCL work: -1, last completed NCCL "
        "work: 20.\n"
    )
    for group in ("", "[rank{r}]:[E1 x.cpp:1664] [PG 1 Rank {r}] "):
        log = "".join(form.replace("{group}", group).format(r=r) for r in (0, 1))
        read, notes = read_log(log)
        assert [len(each.calls) for each in read] == [4, 4]
        assert (explain_hang(read), notes) == ([], [])
    no_status, notes = read_log(form.split("\n")[0].format(r=3))
    assert no_status == []
    assert "rank 3 timed out in no. 21 (reduce_scatter_base of 8)" in notes[0]
    assert notes[1] == "no line of ranks [0, 1, 2]: they died, hang elsewhere, or were filtered out"


def test_forms_of_public_logs_that_said_too_little():
    """accelerate #3380 (status first), #157 (torch 1.9), ArcticTraining #219 (a stuck watchdog)."""
    work, status = watchdog(1, 456, 456, 455).splitlines()
    (read,), notes = read_log(f"{status}\n{work}")
    assert [call.what for call in read.calls if call.number == 456] == ["allreduce of 7"]
    assert not any("no line says" in note for note in notes)
    old = "  what():  [Rank 5] Watchdog caught collective operation timeout: "
    old += "WorkNCCL(OpType=BROADCAST, Timeout(ms)=1800000) ran for 1801256 milliseconds"
    assert read_log(old)[1][0] == "rank 5 timed out in a broadcast, which has no number there"
    old = old.replace("BROADCAST", "SEND")
    assert read_log(old)[1][0] == "rank 5 timed out in a send, which has no number there"
    stuck = "[rank7]:[E6 x.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 7] ProcessGroupNCCL's "
    stuck += "watchdog got stuck for 480 seconds without making progress"
    assert "rank 7's own watchdog got stuck for 480 seconds" in read_log(stuck)[1][0]


def test_calls_that_no_line_counts_are_compared_by_their_number():
    """pytorch #20630 (a broadcast among all_reduces), picotron_tutorial #6, pytorch #134006."""
    calls = [watchdog(r, 21, 21, 20, "BROADCAST" if r == 3 else "ALLREDUCE") for r in (1, 2, 3)]
    first = [call.splitlines()[0] + "\n" for call in calls]
    assert verdicts("".join(first[:2]) + calls[2]) == [(21, (), (3,), ())]
    assert verdicts("".join(first)) == [(21, (), (3,), ())]
    recordings, notes = read_log("".join(first[:2]))
    assert [each.rank for each in recordings] == [1, 2]
    assert notes[0].startswith("ranks 1, 2 timed out in no. 21 (allreduce of 7), and no line says")
    assert explain_hang(recordings) == []
    for apart in (watchdog(3, 5, 5, 4), watchdog(2, 21, 21, 20, group="9(TP)") + calls[2]):
        assert [r.rank for r in read_log(first[0] + apart)[0] if r.rank == 1] == []
    others = [watchdog(r, 5, 5, 4, "_ALLGATHER_BASE").splitlines()[0] for r in (3, 4)]
    assert read_log("\n".join([*first[:2], *others]))[0] == []  # two groups that hang


def test_a_line_that_is_broken_within_a_word_is_one():
    """open-r1 #620, torchtune #1165: at the width of a terminal."""
    log = watchdog(0, 21, 22, 20) + watchdog(1, 21, 22, 20, "BROADCAST")
    for width in (60, 77, 101):
        broken = (line[at : at + width] for line in log.splitlines() for at in range(0, 400, width))
        assert verdicts("\n".join(filter(None, broken))) == verdicts(log) == [(21, (), (0, 1), ())]


def fingerprint(rank, shape, op="_ALLGATHER_BASE"):
    return (
        f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=4, OpType={op}, "
        f"TensorShape=[{shape}], TensorDtypes=BFloat16, TensorDeviceTypes=TensorOptions(dtype=float"
        " (default), device=cuda))"
    )


def test_torchs_own_word_of_a_mismatch_is_read(tmp_path, run_script):
    """OpenDDE #23, ms-swift #9443, SimpleTuner #2712 (the second number is cut, and no shape)."""
    start = "[rank1]: RuntimeError: Detected mismatch between collectives on ranks. "
    log = tmp_path / "run.log"
    log.write_text(f"{start}{fingerprint(1, '359, 1435')}, but {fingerprint(2, '359, 1436')}.\n")
    status, out, _ = run_script(EXPLAIN, log)
    assert status == 1
    assert "call no. 4: ranks 1, 2 do not make the same one (allgather_base of 359 x 1435" in out
    other = "Rank 7 is running collective: CollectiveFingerPrint(SequenceNumber=0OpType=REDUCE)"
    lines = [f"{start}{fingerprint(r, '1', 'BARRIER')}, but {other}.Collectives" for r in (0, 1)]
    (hang,) = explain_hang(mismatches("\n".join(lines)))
    assert (hang.number, hang.odd, hang.last[7].what) == (4, (7,), "reduce")
    cut = f"{start}{fingerprint(2, '1', 'BARRIER')}, but Rank 7 is r"
    assert explain_hang(mismatches("\n".join([cut, *lines])))[0].odd == (7,)
    log.write_text(lines[0] + "\n" + watchdog(2, 21, 21, 20) + watchdog(3, 21, 21, 20))
    assert "ranks 0, 7 do not make the same one" in run_script(EXPLAIN, log).out


def test_a_log_is_read_by_the_script_and_says_what_it_leaves_open(tmp_path, run_script):
    log = tmp_path / "run.log"
    log.write_text(watchdog(0, 21, 22, 20) + asked(3, 20, 20))
    status, out, _ = run_script(EXPLAIN, log)
    assert status == 1
    assert "group 0: allreduce of 7 no. 21 waits for rank 3" in out
    assert "no line of ranks [1, 2]" in out
    log.write_text(watchdog(0, 21, 21, 20) + asked(1, 20, 20) + asked(2, 20, 20))
    status, out, _ = run_script(EXPLAIN, log)
    assert "waits for ranks 1, 2" in out
    assert "only rank 0 made it" in out
    log.write_text(watchdog(0, 21, 21, 20))
    status, out, _ = run_script(EXPLAIN, log)
    assert out.startswith("of one rank alone: who did not come")
    log.write_text(watchdog(0, 21, 21, 20).splitlines()[0])
    status, _, err = run_script(EXPLAIN, log)
    assert status == 2
    assert "nothing to compare: rank 0 timed out in no. 21" in err
    log.write_text("loss 3.1\n")
    status, _, err = run_script(EXPLAIN, tmp_path)
    assert status == 2
    assert "neither dumps nor the watchdog's lines" in err
