"""What neither check nor notebook has: real slow links, real faults, noise, odd reports."""

import argparse
import functools
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lessons.lesson21_clusters import preflight
from lessons.lesson21_clusters.diagnosis import FACTOR, NOTHING, own_seconds, verdict, whole_seconds
from lessons.lesson21_clusters.experiments import (
    called,
    firewall,
    on_interfaces,
    preflight_on_nodes,
    readdress,
    slow_sender,
)
from lessons.lesson21_clusters.laboratory import recordings, whole_run
from lessons.lesson21_clusters.preflight import describe
from shared.clusters import addresses, links
from shared.clusters.addresses import Meeting
from shared.clusters.hangs import explain_hang
from shared.clusters.links import LinkTable, measure_links
from shared.clusters.odd import find_odd
from shared.clusters.recordings import Call, Recording, dump, from_dump, own_groups, recorded
from shared.clusters.report import (
    GIB,
    Report,
    clock_findings,
    clock_offsets,
    disagreements,
    link_findings,
    own_report,
    unreached,
)
from shared.clusters.saves import look_at_saves
from shared.clusters.stragglers import find_straggler
from shared.clusters.verdicts import describe_hang
from shared.errors import NoGroup
from shared.exercises.lessons import ROOT
from shared.ranks.forked import RankFailed, run_ranks
from shared.ranks.group import Rank, own_device
from shared.ranks.links import throttled_links, why_not

START = ROOT / "lessons" / "lesson21_clusters" / "start"
needs_namespaces = pytest.mark.skipif(bool(why_not()), reason="needs network namespaces")


@functools.cache
def run_of(fault):
    return whole_run(fault)


def judged(run):
    own = own_seconds(run.seen)
    return verdict(
        run.findings,
        explain_hang([each.recording for each in run.seen]),
        [each.said for each in run.seen],
        find_straggler(own, FACTOR) if own.numel() else None,
        [],  # links in microseconds: on a busy machine a test of its own
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "raised", "words"),
    [
        ("none", [], [NOTHING]),
        ("blocked_port", [], ["rank 2 at ", "is not reached by [0, 1]"]),
        ("wrong_interface", [], ["rank 2 at 198.51.100.77 (ib0) is not reached by [0, 1]"]),
        ("versions", [], ["torch differ: rank 2: 2.11.0"]),
        ("batches", [0, 1], ["no. 21 waits for rank 2; rank 2's last call: no. 20"]),
        ("mismatch", [0, 1, 2], ["call no. 21: rank 2 and the others", "all_gather of 1 float32"]),
        ("slow_node", [], ["rank 2 is late in"]),
        ("full_disk", [0, 1, 2], ["no. 21 waits for rank 2", "No space left on device"]),
        ("out_of_memory", [0, 1, 2], ["no. 21 waits for rank 2", "can't allocate memory"]),
    ],
)
def test_every_fault_is_named(fault, raised, words):
    run = run_of(fault)
    assert [rank for rank, each in enumerate(run.seen) if each.said] == raised
    said = judged(run)
    assert all(each in said for each in words), said


@pytest.mark.full
def test_noise_makes_nobody_a_straggler():
    for _ in range(5):
        assert judged(whole_run("none", timeout=20.0)) == NOTHING


def test_whole_steps_do_not_show_the_slow_node():
    run = run_of("slow_node")
    assert find_straggler(whole_seconds(run.seen).double()) is None
    found = find_straggler(own_seconds(run.seen))
    assert found is not None
    assert found.rank == 2
    assert found.lost > 1  # 23 steps of 0.1 s, and what the machine's noise hides


def two_calls(rank):
    for _ in range(2):
        dist.all_reduce(torch.ones(2))
    return len(dump()["entries"])


def test_a_forked_rank_has_no_calls_of_its_parent(tmp_path):
    assert run_ranks(two_calls, 2) == [2, 2]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert two_calls(0) >= 2
    finally:
        dist.destroy_process_group()
    assert run_ranks(two_calls, 2) == [2, 2]


def test_without_a_majority_there_are_no_others():
    (hang,) = explain_hang(recordings([["all_reduce"], ["all_gather"]]))
    assert describe_hang(hang).startswith("call no. 1: ranks 0, 1 do not make the same one")
    (hang,) = explain_hang(recordings([["all_reduce"], ["all_reduce"], ["all_gather"]]))
    assert describe_hang(hang).startswith("call no. 1: rank 2 and the others do not make the same")


def some_calls(rank):
    """Calls in two groups, of several kinds, and point-to-point messages between."""
    pair = dist.new_group([0, 1])
    x = torch.ones(3, 2)
    dist.all_reduce(x)
    if rank < 2:
        dist.all_reduce(torch.ones(4, dtype=torch.float64), group=pair)
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
    gathered = [torch.empty_like(x) for _ in range(3)] if rank == 0 else None
    dist.gather(x, gathered, 0)
    return recorded()


def test_a_recording_has_groups_numbers_and_what_is_equal_on_ranks_that_fit():
    by_rank = run_ranks(some_calls, 3)
    assert not explain_hang(by_rank)  # a root's gather is the others' gather
    assert not any(each.full for each in by_rank)  # what the parent had recorded is no loss
    own = [(call.group, call.number, call.what) for call in by_rank[0].calls]
    assert own[0] == ("0", 1, "all_reduce of 6 float32")
    assert ("1", 1, "all_reduce of 4 float64") in own
    assert by_rank[0].members == {"0": (0, 1, 2), "1": (0, 1)}
    assert "1" not in by_rank[2].members
    assert by_rank[0].calls[0].at.startswith("test_clusters.py:")


def many_calls(rank):
    for _ in range(9):
        dist.all_reduce(torch.ones(2))
    if rank != 1:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work is not None
    return from_dump(rank, dump(), own_groups())


def keep_four(rank):
    os.environ["TORCH_FR_BUFFER_SIZE"] = "4"


@pytest.mark.full
def test_a_full_buffer_keeps_the_last_calls_and_their_numbers():
    """Where nothing was recorded before: only the first call decides the buffer's size."""
    program = f"import runpy; runpy.run_path({__file__!r})['recording_in_a_full_buffer']()"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr


def recording_in_a_full_buffer():
    by_rank = run_ranks(many_calls_and_a_wait, 3, before=keep_four)
    assert [(len(each.calls), each.full) for each in by_rank] == [(4, True)] * 3
    (hang,) = explain_hang(by_rank)
    assert (hang.number, hang.missing) == (10, (1,))
    said = describe_hang(hang, {0: "nothing of interest", 1: "ValueError"})
    assert said.startswith("all_reduce of 2 float32 no. 10 waits for rank 1;")
    assert said.endswith("rank 1 said: ValueError")


def many_calls_and_a_wait(rank):
    """Rank 1 makes its tenth call late, when all have been recorded."""
    seen = many_calls(rank)
    store = dist.distributed_c10d._get_default_store()
    store.set(f"seen_{rank}", "")
    store.wait([f"seen_{each}" for each in range(3)])
    if rank == 1:
        dist.all_reduce(torch.ones(2))
    dist.barrier()
    return seen


def measured(rank):
    return measure_links(num_bytes=128 * 1024, repeats=2)


@needs_namespaces
def test_a_slow_sender_is_found_by_bandwidth_and_not_by_latency():
    with throttled_links(3, 400) as slow:
        slow_sender(slow, 2, 10)
        table = run_ranks(measured, 3, before=slow.enter, timeout=120)[0]
    (odd,) = find_odd(table.large)
    assert (odd.rank, odd.slow) == (2, "sending")
    seconds = table.large[2, 0].item()
    assert 1.1 * seconds > 8 * (128 - 16) * 1024 / 10e6, "112 KiB at 10 Mbit/s take 92 ms"
    assert torch.equal(table.small, table.small.T)


@needs_namespaces
@pytest.mark.parametrize(
    ("interfaces", "walled", "status", "words"),
    [
        pytest.param(["eth0", "eth0"], "", 0, "nothing found that breaks a run",
                     marks=pytest.mark.full),
        (["eth0", "lo"], "", 1, "rank 1 at 127.0.0.1 (lo) is not reached by [0]"),
        pytest.param(["eth0", "eth0"], "firewall", 1, "is not reached by [0]: timed out",
                     marks=pytest.mark.full),
        pytest.param(["eth0", "eth0"], "mtu", 1, "it answers, but 32,768 of 32,768 bytes do not",
                     marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_preflight_on_two_nodes(interfaces, walled, status, words):
    with throttled_links(2, 1000) as links:
        if walled == "firewall":
            firewall(links, 1, 29500)
        if walled == "mtu":  # of the bridge's port; senders must not put packets together
            hub = f"hub-{links.names[0].partition('-')[2]}"
            small = ["ip", "netns", "exec", hub, "ip", "link", "set", "port1", "mtu", "1400"]
            one = ["ip", "link", "set", "eth0", "gso_max_segs", "1", "gso_max_size", "1500"]
            for command in (small, links.command(0, one), links.command(1, one)):
                subprocess.run(command, check=True, capture_output=True)
        ended, said = preflight_on_nodes(links, interfaces)
    assert (ended, words in said) == (status, True), said


@needs_namespaces
def test_whether_a_wrong_interface_breaks_a_group_of_gloos_depends_on_the_addresses():
    def callers(network):
        with throttled_links(2, 1000) as links:
            readdress(links, network)
            return run_ranks(called, 2, before=on_interfaces(links, ["eth0", "lo"]), timeout=60)

    assert callers("10.77.0") == ["accepted", "called"]
    with pytest.raises(RankFailed, match="Connection refused"):
        callers("192.168.77")


JOIN = """import datetime, time
import torch.distributed as dist
began = time.time()
try:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=3))
except RuntimeError as error:
    print(f"after {time.time() - began:.0f} s: {error}")
"""


@needs_namespaces
@pytest.mark.full
def test_behind_a_firewall_gloo_gives_up_late_and_names_no_address(tmp_path):
    script = tmp_path / "join.py"
    script.write_text(JOIN)
    with throttled_links(2, 1000) as links:
        firewall(links, 1, 29500)
        _, said = preflight_on_nodes(links, ["eth0", "eth0"], script)
    (line,) = [each for each in said.splitlines() if each.startswith("after ")]
    assert "Gloo connectFullMesh failed" in line, line
    assert int(line.split()[1]) >= 2 * 3, line
    assert "10.77" not in line


def report(rank, **more):
    plain = {
        "host": f"node{rank}", "network": f"node{rank}", "address": f"10.0.0.{rank}",
        "interface": "eth0", "device": "cpu", "python": "3.11.7", "torch": "2.13.0", "cuda": "-",
        "nccl": "-", "cores": 2, "free": 8 * GIB, "disk": 50 * GIB, "variables": {},
    }  # fmt: skip
    return Report(rank=rank, **(plain | more))


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({}, None),
        ({"torch": "2.12.0"}, "torch differ: rank 1: 2.12.0; the others: 2.13.0"),
        ({"variables": {"NCCL_ALGO": "Ring"}}, "rank 1: NCCL_ALGO=Ring; the others: none set"),
        ({"free": 3 * GIB}, "rank 1 has 3.0 GiB of memory free, others 8.0"),
        ({"disk": GIB // 2}, "rank 1 has 0.50 GiB of disk free"),
        ({"address": "127.0.1.1"}, "rank 1 gives 127.0.1.1 (eth0), where others reach themselves"),
    ],
)
def test_in_what_a_rank_differs(own, words):
    found = disagreements([report(0), report(1, **own), report(2)])
    assert [each.ranks for each in found] == ([] if words is None else [(1,)])
    assert all(words in each.words and each.breaks for each in found)


def test_a_node_may_have_its_own_interface_and_log_and_is_told_so():
    own = {"NCCL_SOCKET_IFNAME": "ens5", "NCCL_DEBUG": "INFO", "NCCL_PROTO": "LL"}
    first, second = disagreements([report(0), report(1, variables=own), report(2)])
    assert first.words == "variables differ: rank 1: NCCL_PROTO=LL; the others: none set"
    assert first.breaks
    told = "rank 1: NCCL_SOCKET_IFNAME=ens5, NCCL_DEBUG=INFO; the others: none set"
    assert (second.words, second.breaks) == (f"variables differ: {told}", False)


def test_variables_that_are_not_everybodys_are_marked_as_rank_0s():
    ours, theirs = report(0, variables={"NCCL_ALGO": "Ring"}), report(1)
    assert "NCCL_ALGO=Ring (rank 0's)" in describe([ours, theirs])
    assert "(rank 0's)" not in describe([ours, ours])


def test_every_rank_looks_at_its_own_gpu(monkeypatch):
    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (place | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert own_device() == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", None)  # it is not asked
    assert own_device("cpu") == torch.device("cpu")


def test_two_versions_on_two_ranks_have_no_majority():
    (found,) = disagreements([report(0), report(1, torch="2.12.0")])
    assert found.ranks == (0, 1)


SHUT = "timed out"


@pytest.mark.parametrize(
    ("shut", "words"),
    [
        ([(0, 2), (1, 2), (2, 0), (2, 1)], [((2,), "node node2 (ranks [2]) at 10.0.0.2")]),
        ([(0, 2), (1, 2)], [((2,), "rank 2 at 10.0.0.2 (eth0) is not reached by [0, 1]: timed")]),
        ([(0, 1), (1, 0)], [((0,), "rank 0 at"), ((1,), "rank 1 at")]),
    ],
)
def test_a_node_behind_a_firewall_is_named_and_not_all_the_others(shut, words):
    table = [[SHUT if (a, b) in shut else "" for b in range(3)] for a in range(3)]
    found = unreached([report(rank) for rank in range(3)], table)
    assert [each.ranks for each in found] == [ranks for ranks, _ in words]
    assert all(each.words.startswith(said) for each, (_, said) in zip(found, words, strict=True))


def test_packets_that_are_lost_because_they_are_large_are_told_from_a_closed_door(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        assert addresses._call("127.0.0.1", port, 0.3) == ""
        monkeypatch.setattr(addresses, "PROBE", 1 << 20)
        monkeypatch.setattr(socket.socket, "sendall", lambda line, data: line.send(data))
        said = addresses._call("127.0.0.1", port, 0.3)  # nobody reads: its buffer is full
    assert said.startswith("it answers, but ")
    assert "of 1,048,576 bytes do not arrive within 0.3 s: are packets lost" in said
    assert addresses._call("127.0.0.1", port, 0.3) == "Connection refused"


def table_of(speed):
    large = 1e6 / torch.tensor(speed, dtype=torch.float64)
    return LinkTable(torch.zeros_like(large), large.fill_diagonal_(0), 1_000_000)


def test_the_two_directions_of_a_link_are_compared_and_a_speed_can_be_asked_for():
    slow = table_of([[1, 125e6], [1.2e6, 1]])
    (found,) = link_findings(slow)
    words = "one direction of a link is slow: rank 1 to 0: 1.2 MB/s, rank 0 to 1: 125 MB/s"
    assert (found.ranks, found.words, found.breaks) == ((1, 0), words, False)
    assert not link_findings(slow, named=[1])
    (found,) = link_findings(slow, named=[1], at_least=100e6)
    assert (found.ranks, found.breaks) == ((0, 1), True)
    assert found.words == "links below 100 MB/s: rank 1 to 0: 1.2"
    assert not link_findings(table_of([[1, 125e6], [40e6, 1]]))
    assert not link_findings(table_of([[1, 1e16], [40e6, 1]]))  # took no time: not measured


def test_a_message_that_does_not_come_is_a_finding_on_every_rank(monkeypatch):
    def measure(error: RuntimeError):
        def raises(*given, **more):
            raise error

        monkeypatch.setattr(preflight, "measure_links", raises)

    monkeypatch.setattr(preflight, "clock_offsets", lambda rank: [0.0, 0.0])
    args, store = argparse.Namespace(mib=1.0, patience=1.0), dist.HashStore()
    for number, error in enumerate((links.NoAnswer("no answer"), RuntimeError("peer lost"))):
        rank = Rank(number, number, 2, torch.device("cpu"), "gloo")
        measure(error)
        (found,) = preflight.look_at_links(Meeting(store, number, 2, 1.0), rank, args)
        assert found.words == "no answer; the links after it are not measured"
        assert found.breaks


def one_pair_waits(rank):
    if rank == 1:
        plain = links._fastest
        monkey = lambda *given: time.sleep(2.5) or plain(*given)  # noqa: E731
        links._fastest = monkey
    try:
        measure_links(num_bytes=4096, repeats=1, seconds=1.0)
    except links.NoAnswer as error:
        return str(error)
    except RuntimeError:
        return "a peer is gone"
    return ""


def test_a_link_that_does_not_answer_is_named_by_its_pair():
    words = "a message of 4 bytes from rank 0 to rank 1 was not answered within 1 s"
    first, second, third = run_ranks(one_pair_waits, 3, timeout=60)
    assert first == words
    assert third == "a peer is gone"
    assert second in (words, "a peer is gone")


def test_folders_of_checkpoints_that_are_two_are_told_before_there_is_a_group(tmp_path):
    def ask(name: str, folders: list[Path]):
        store = dist.PrefixStore(name, dist.HashStore())
        ranks = [report(rank) for rank in range(3)]
        with ThreadPoolExecutor(3) as pool:
            asked = [
                pool.submit(look_at_saves, Meeting(store, rank, 3, 20.0), ranks, folder)
                for rank, folder in enumerate(folders)
            ]
            found = [each.result() for each in asked]
        assert len({str([each.ranks for each in own]) for own in found}) == 1
        return [(each.ranks, each.words.partition(" ")[2].partition(" ")[2]) for each in found[0]]

    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    assert ask("a", [one] * 3) == []
    words = "is another folder than rank 0's: is it on a shared disk? (ranks [1] on node1)"
    assert ask("b", [one, other, one]) == [((1,), words)]
    words = "is not there: is its disk mounted? (ranks [1, 2] on node1, node2)"
    assert ask("c", [one, tmp_path / "x", tmp_path / "x"]) == [((1, 2), words)]
    refused = ask("d", [one, one / ("x" * 300), one])  # which Path.is_dir raises
    assert refused == [((1,), "cannot be written: File name too long (ranks [1] on node1)")]
    assert own_report(0, torch.device("cpu"), one / ("x" * 300)).disk > 0
    assert not [*one.iterdir(), *other.iterdir()]


def test_a_clock_that_is_off_misleads_and_breaks_nothing():
    (found,) = clock_findings([0.0, 0.01, -7.5])
    assert (found.ranks, found.breaks) == ((2,), False)
    assert "-7.5 s" in found.words


def clocks(rank):
    return clock_offsets(Rank(rank, rank, 3, torch.device("cpu"), "gloo"))


def test_clocks_of_one_machine_agree():
    for offsets in run_ranks(clocks, 3):
        assert max(map(abs, offsets)) < 0.5


def test_ranks_that_do_not_come_are_named():
    meeting = Meeting(dist.HashStore(), 0, 3, patience=0.1)
    with pytest.raises(NoGroup, match=r"ranks \[1, 2\] of 3 did not come within 0.1 s"):
        meeting.gathered("report", 1)


@pytest.mark.parametrize("path", sorted(START.glob("*.sh")), ids=lambda path: path.name)
def test_a_start_script_without_arguments_says_how(path):
    done = subprocess.run(["bash", path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_a_number_that_no_recording_has_is_passed_over():
    calls = tuple(Call("0", number, "all_reduce of 1 float32", "a line") for number in (1, 3))
    both = [Recording(rank, {"0": (0, 1)}, calls) for rank in range(2)]
    assert explain_hang(both) == []
