"""The script and the preflight under torchrun; bad input."""

import json

import pytest

from shared.exercises.lessons import ROOT
from shared.ranks.launching import free_port

FOLDER = ROOT / "lessons" / "lesson21_clusters"
SCRIPT, PREFLIGHT = FOLDER / "train.py", FOLDER / "preflight.py"
TINY = ("--preset", "tiny")


@pytest.mark.parametrize(
    ("ranks", "args", "words"),
    [
        (3, ("--fault", "none"), "nothing found"),
        pytest.param(1, ("--fault", "full_disk"), "rank 0 said: OSError", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_the_script_names_the_fault(ranks, args, words, launch_on):
    metrics = launch_on(SCRIPT, (ranks,), *TINY, *args)[ranks][1]
    assert words in metrics["verdict"]
    assert metrics["found"] == ("none" not in args)
    assert metrics["table"][0]["found"] == metrics["verdict"]


def test_preflight_alone(tmp_path, run_script):
    args = ("--device", "cpu", "--out", tmp_path)
    status, out, _ = run_script(PREFLIGHT, *args, GLOO_SOCKET_IFNAME="lo,")  # which gloo takes
    assert status == 0
    assert "nothing found that breaks a run" in out
    assert (tmp_path / "links.png").is_file()


def test_preflight_that_cannot_draw_has_its_verdict(tmp_path, run_script):
    (tmp_path / "file").touch()
    status, out, _ = run_script(PREFLIGHT, "--device", "cpu", "--out", tmp_path / "file")
    assert status == 0
    assert f"look at this: --out {tmp_path}/file cannot be written (File exists)" in out
    assert "nothing found that breaks a run" in out


def test_preflight_under_deepspeeds_launcher_which_says_local_size(tmp_path, run_script):
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    args = ("--device", "cpu", "--out", tmp_path)
    assert run_script(PREFLIGHT, *args, **place, **address).status == 0


def test_preflight_of_a_disk_that_is_too_small(tmp_path, run_script):
    args = ("--device", "cpu", "--out", tmp_path, "--disk", "1e9")
    status, out, _ = run_script(PREFLIGHT, *args)
    assert status == 1
    assert "BREAKS A RUN: rank 0 has" in out


def test_preflight_looks_for_the_folder_of_checkpoints_and_does_not_make_it(tmp_path, run_script):
    saves, args = tmp_path / "saves", ("--device", "cpu", "--out", tmp_path / "out")
    status, out, _ = run_script(PREFLIGHT, *args, "--saves", saves)
    assert status == 1
    assert f"BREAKS A RUN: --saves {saves} is not there: is its disk mounted? (ranks [0]" in out
    saves.mkdir()
    assert run_script(PREFLIGHT, *args, "--saves", saves).status == 0
    assert not list(saves.iterdir())


def test_the_last_page_under_torchrun_has_the_findings(tmp_path, run_script):
    file = tmp_path / "error.json"
    args = ("--device", "cpu", "--out", tmp_path, "--disk", "1e9")
    assert run_script(PREFLIGHT, *args, TORCHELASTIC_ERROR_FILE=str(file)).status == 1
    told = json.loads(file.read_text())["message"]
    assert told["message"].startswith("BREAKS A RUN: rank 0 has")
    assert told["extraInfo"]["py_callstack"] == told["message"]


@pytest.mark.parametrize(
    ("script", "args", "environment", "words"),
    [
        (SCRIPT, ("--fault", "batches"), {}, "--fault batches is a difference between ranks"),
        (SCRIPT, ("--device", "cuda"), {}, "--device cuda: NCCL's watchdog"),
        (SCRIPT, ("--fault", "full_disk", "--steps", "5"), {}, "strikes in step 21, not in 5"),
        (SCRIPT, ("--fault", "fire"), {}, "invalid choice"),
        (SCRIPT, ("--timeout", "0"), {}, "must be a number above 0, got '0'"),
        (PREFLIGHT, (), {"GLOO_SOCKET_IFNAME": "lo,ib7"}, "GLOO_SOCKET_IFNAME=ib7 is no interface"),
        (PREFLIGHT, ("--patience", "0.5"), {
            "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9",
        }, "no store at 127.0.0.1:9"),
    ],
)  # fmt: skip
def test_bad_input_is_said_in_one_line(script, args, environment, words, refused):
    more = TINY if script is SCRIPT else ("--device", "cpu")
    assert words in refused(script, *more, *args, **environment)


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("fsdp2", {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}),
        (
            "deepspeed",
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
        ),
    ],
)
def test_accelerate_reads_the_files_and_tells_its_ranks(name, variables):
    pytest.importorskip("accelerate")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    file = FOLDER / "start" / f"accelerate_{name}.yaml"
    given = launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    given, _, _ = _validate_launch_command(given)
    given.deepspeed_fields_from_accelerate_config = ""  # what the command itself adds
    told = prepare_multi_gpu_env(given) if name == "fsdp2" else prepare_deepspeed_cmd_env(given)[1]
    wanted = variables | {"ACCELERATE_MIXED_PRECISION": "bf16"}
    assert {key: told.get(key) for key in wanted} == wanted
    assert given.num_processes == 8
