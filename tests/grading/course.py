"""The course as the grader reads it, once a process."""

from functools import cache, partial

from shared.exercises.lessons import ROOT
from solutions.grading.intake.lesson import read_lessons

course = cache(partial(read_lessons, ROOT))
