"""The script's own last words come before torchrun's page and torch's C++ frames."""

from shared.ranks.logs import first_failure, last_words, place_in_the_chain

REPORT = """\
error: --out /x cannot be written
E1121 13:38:05 28036 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 2)
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/torch/distributed/run.py", line 1032, in <module>
    main()
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 28034)  (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_13:38:00
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {cause}
  error_file: <N/A>
============================================================
"""


def test_what_the_script_said_is_kept_and_torchruns_page_is_not():
    log = REPORT.format(cause="2 (pid: 28035) ")
    assert last_words(log) == ["error: --out /x cannot be written"]
    assert first_failure(log) == "rank 1: exit status 2"


def test_a_killed_rank_is_named():
    log = REPORT.format(cause="-9 (pid: 28035)  (SIGKILL)")
    assert first_failure(log) == "rank 1 was ended by SIGKILL"
    silent = log.split("\n", 1)[1]
    assert last_words(silent)[-1].startswith("====")


def test_a_rank_that_died_is_the_cause_though_its_peer_noted_an_earlier_second():
    """rank 0 noted that its peer was gone at 10.99 s, torchrun saw at 11.00 s that rank 1 was."""
    died = REPORT.replace("-15 (pid: 28034)  (SIGTERM)", "-6 (pid: 28034)  (SIGABRT)")
    assert first_failure(died.format(cause="-15 (pid: 28035)  (SIGTERM)")) == (
        "rank 0 was ended by SIGABRT"
    )
    lost = died.format(cause="1 (pid: 28035) ").split("\n", 1)[1]
    raised = "[rank1]: RuntimeError: [gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:5\n"
    assert first_failure(raised + lost) == "rank 0 was ended by SIGABRT"
    assert first_failure("[rank1]: ValueError: no\n" + raised + lost) == "rank 1: exit status 1"
    killed = "[2]:\n  rank      : 2 (local_rank: 2)\n  exitcode  : -9 (pid: 28036)  (SIGKILL)\n"
    lost = lost.replace("-----\nRoot", f"-----\n{killed}Root")  # NCCL aborts where it lost a peer
    assert first_failure(raised + lost) == "rank 2 was ended by SIGKILL"
    ended = lost.replace("1 (pid: 28035) ", "-15 (pid: 28035)  (SIGTERM)")
    assert first_failure(ended) == "rank 2 was ended by SIGKILL"


def test_of_a_progress_bar_only_what_stood_there_last():
    assert last_words("a\r 10 %\r 20 %\r\nb\n\n", 2) == [" 20 %", "b"]
    assert first_failure("all is well") == ""


# What torch 2.13 says on a node whose agent was answered by no store any more: the C++ frames of
# each call, then torchrun's way to its end. The functions' names and the paths are shortened.
STORE_GONE = """\
[W1128 18:49:24.532654429 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=3, \
addr=[::ffff:127.0.0.1]:42552, remote=[::ffff:127.0.0.1]:45209): Failed to recv, got 0 bytes. \
Connection was likely closed. Did the remote server shutdown or crash?
Exception raised from recvBytes at /pytorch/c10d/Utils.hpp:787 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7fe3cf79eb8d in /torch/lib/libc10.so)
frame #3: <unknown function> + 0x674888d (0x7fe3bf94888d in /torch/lib/libtorch_cpu.so)
frame #7: c10d::TCPStore::get(std::string const&) + 0x8e (0x7fe3 in /torch/lib/libtorch_cpu.so)
<omitting python frames>
frame #33: __libc_start_main + 0x85 (0x7fe3d0245305 in /lib/x86_64-linux-gnu/libc.so.6)

"""
AGENT_ENDS = """\
W1128 18:49:24.738000 28150 /torch/distributed/elastic/multiprocessing/api.py:1028] Sending \
process 28515 closing signal SIGTERM
Traceback (most recent call last):
  File "/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py", line 114, in _call_store
    return getattr(self._store, store_op)(*args, **kwargs)
torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/torch/distributed/run.py", line 1032, in <module>
    main()
torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection has failed.
"""
OWN_ERROR = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/lessons/train.py", line 10, in <module>
[rank1]:     run_script(main)
[rank1]:   File "/torch/distributed/elastic/errors/__init__.py", line 367, in wrapper
[rank1]:     return f(*args, **kwargs)
[rank1]: KeyError: 'the cause'
"""
PEER_LOST = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/lessons/train.py", line 12, in main
[rank0]:     dist.all_reduce(torch.ones(3))
[rank0]: RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:9427.
"""
NCCL = """\
[rank1]:[E1128 18:49:24.533 ProcessGroupNCCL.cpp:690] [Rank 1] Watchdog caught a timeout
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [Rank 1] Watchdog caught a timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE)
Exception raised from checkTimeout at /c10d/ProcessGroupNCCL.cpp:693 (most recent call first):
C++ CapturedTraceback:
#4 c10::Error::Error(c10::SourceLocation, std::string) from ??:0
"""


def test_frames_of_torchs_own_do_not_push_out_the_words_of_the_rank():
    words = ["error: no space left on this node"]
    assert last_words(words[0] + "\n" + STORE_GONE * 3 + AGENT_ENDS) == words
    assert last_words(STORE_GONE + words[0] + "\n" + STORE_GONE) == words
    assert last_words(f"[Gloo] Rank 0 is connected to 1 peer ranks. Expected\n{words[0]}") == words


def test_where_the_rank_said_nothing_no_frame_is_shown_either():
    said = "\n".join(last_words(STORE_GONE + AGENT_ENDS))
    assert said.endswith("RendezvousConnectionError: The connection has failed.")
    for word in ("frame #", "<unknown function>", "<omitting python frames>", "most recent call f"):
        assert word not in said


def test_an_agents_cause_may_say_several_lines():
    ends = AGENT_ENDS.replace("Connection was likely closed.", "Closed.\nDid the server\n crash?")
    assert ends != AGENT_ENDS
    assert last_words("error: mine\n" + ends) == ["error: mine"]


def test_a_stack_that_is_no_error_hides_nothing():
    frame = '  File "/torch/distributed/run.py", line 9 in f'
    told = [*OWN_ERROR.replace("[rank1]: ", "").splitlines(), "Thread 0x7fe3 (stack):", frame]
    assert last_words("\n".join(told)) == told


def test_a_traceback_through_record_is_the_scripts_own():
    report = REPORT.format(cause="1 (pid: 28035) ").split("\n", 1)[1]
    assert last_words(OWN_ERROR + report) == OWN_ERROR.splitlines()


def test_what_is_said_after_a_restart_is_shown():
    first = "E1128 18:49:24 281 /torch/distributed/elastic/multiprocessing/api.py:1002] failed\n"
    assert last_words(f"step 1\n{first}error: the second time\n{AGENT_ENDS}") == [
        "step 1",
        "error: the second time",
    ]


def test_what_ranks_say_to_ctrl_c_is_not_what_they_said():
    signal = "W1128 18:49:54 2 /torch/distributed/elastic/agent/server/api.py:753] Received 2 death"
    log = f"waiting\n{signal} signal, shutting down workers\nKeyboardInterrupt\n"
    assert last_words(log) == ["waiting"]
    preempted = "error: --save cannot be written"  # SIGTERM is answered by a checkpoint
    log = f"waiting\n{signal.replace(' 2 ', ' 15 ')} signal\n{preempted}\n"
    assert last_words(log)[-1] == preempted


def test_ranks_that_lost_a_peer_do_not_hide_the_one_that_failed():
    assert last_words(OWN_ERROR + PEER_LOST) == OWN_ERROR.splitlines()
    assert last_words(PEER_LOST) == PEER_LOST.splitlines()
    both = PEER_LOST + OWN_ERROR.replace("rank1", "rank0")  # raised while it dealt with the loss
    assert last_words(both) == both.splitlines()
    result = "mean_error: 0.01\n"  # is none
    assert last_words(result + PEER_LOST) == (result + PEER_LOST).splitlines()


def test_of_nccl_the_complaint_stays_and_the_frames_go():
    assert last_words(NCCL) == NCCL.splitlines()[:3]


def test_a_node_that_lost_the_others_comes_after_the_one_that_failed():
    report = REPORT.format(cause="1 (pid: 28035) ")
    failed, lost = OWN_ERROR + report, PEER_LOST + report.split("\n", 1)[1]
    assert place_in_the_chain(failed) < place_in_the_chain("")
    assert place_in_the_chain("") < place_in_the_chain(lost)
    assert place_in_the_chain("") < place_in_the_chain(STORE_GONE + AGENT_ENDS)
    killed = REPORT.format(cause="-9 (pid: 28035)  (SIGKILL)").split("\n", 1)[1]
    assert place_in_the_chain(PEER_LOST + killed) == place_in_the_chain(failed)
    aborted = PEER_LOST + killed.replace("KILL", "ABRT")
    assert place_in_the_chain(aborted) == place_in_the_chain(lost)
