"""Guess first: the answers are those of the arithmetic, and a page says how far off a guess is."""

import json

import pytest

from shared.book.chinese import chinese_pictures
from shared.book.explorables import EXPLORABLES
from shared.book.explore import explore_pages
from shared.book.guesses import GUESSES
from tests.book.test_book import in_this_course, named, written

ANSWERS = {
    "one_gpu": "optimizer states",
    "ring": 2 * 7 / 8,
    "collectives": 2 * 3,  # there and back, log2(8) rounds each
    "zero_stages": 7 * (4 + 12 / 64),
    "pipeline": 100 * 3 / 19,
    "mesh": 16,  # a group's two ranks are 16 apart, a node has 8
    "strategies": 3,
    "ddp_step": 16 / 4,
    "fsdp_step": 2,
    "tensor_parallel": 2 * 64 * 8 * 4 / 1024,
    "offload": 2 * 2 * 7 / 4,  # for forward and for backward, a rank's part in 16 bits
    "accelerate": 3,
}


@pytest.mark.parametrize("each", [in_this_course(each) for each in EXPLORABLES])
def test_the_answer_is_what_arithmetic_says_and_is_not_shown_at_first(each):
    guess = GUESSES[each.name]
    assert guess.choice != each.first_choice
    data = guess.as_data({"|".join(map(str, guess.choice)): each.state(*guess.choice)})
    rounded = data["is"] if isinstance(data["is"], str) else pytest.approx(data["is"], rel=5e-3)
    assert ANSWERS[each.name] == rounded


# Guesses, is told, looks on, and writes down: [verdict, choices of the view] after each.
GUESSER = """
const form = document.querySelector("form"), field = form.querySelector("select, input"), seen = [];
const look = () => seen.push([form.querySelector("output").textContent,
  [...document.querySelectorAll(".explorable-view select")].map((each) => each.value)]);
look();
for (const given of GIVEN) {
  field.value = given;
  form.querySelector("button").click();
  look();
}
form.querySelectorAll("button")[1].click();
look();
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "make", "told"),
    [
        (
            "zero_stages",
            explore_pages,
            {
                "44": "You said 44 GB; it is 29.3 GB: yours is 150 % of it.",
                "0": "You said 0 GB; it is 29.3 GB: yours is 0 % of it.",
                "29": "Right, within 5 %: it is 29.3 GB.",
                "": "Right, within 5 %: it is 29.3 GB.",  # an empty field: nothing is sent
                "-5": "Right, within 5 %: it is 29.3 GB.",  # nor less than nothing
                "12345": "You said 12345 GB; it is 29.3 GB: yours is 42133 % of it.",
                None: "It is 29.3 GB.",
            },
        ),
        (
            "zero_stages",
            lambda _: chinese_pictures(["lesson10_zero"]),
            {
                "44": "你猜的是 44 GB；答案是 29.3 GB：你的数是它的 150 %。",
                None: "答案是 29.3 GB。",
            },
        ),
        (
            "pipeline",  # 100 * 3 / 19, of which 15 is 95 %
            explore_pages,
            {"15": "Right, within 5 %: it is 15.8 %.", None: "It is 15.8 %."},
        ),
        (
            "one_gpu",
            explore_pages,
            {
                "activations": "You said activations (40.9 GB); it is optimizer states (96.4 GB).",
                "optimizer states": "Right: optimizer states (96.4 GB).",
                None: "It is optimizer states (96.4 GB).",
            },
        ),
    ],
)
def test_a_guess_is_told_how_far_off_it_is_and_the_picture_goes_to_its_answer(
    name, make, told, tmp_path
):
    given = [each for each in told if each is not None]
    driver = GUESSER.replace("GIVEN", json.dumps(given))
    seen = written(named(name), driver, tmp_path, {}, make)
    assert seen[0] == ["", list(map(str, named(name).first_choice))]
    assert [verdict for verdict, _ in seen[1:]] == list(told.values())
    assert all(choice == list(map(str, GUESSES[name].choice)) for _, choice in seen[1:])
