"""The script's own last words come before torchrun's page about itself."""

from shared.ranks.logs import first_failure, last_words

REPORT = """\
error: --out /x cannot be written
E1121 13:38:05 28036 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 2)
Traceback (most recent call last):
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


def test_of_a_progress_bar_only_what_stood_there_last():
    assert last_words("a\r 10 %\r 20 %\r\nb\n\n", 2) == [" 20 %", "b"]
    assert first_failure("all is well") == ""
