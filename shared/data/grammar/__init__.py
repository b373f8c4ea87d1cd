"""English-German sentence pairs from a grammar of our own."""

from shared.data.grammar.generator import SEED as SEED
from shared.data.grammar.generator import Splits as Splits
from shared.data.grammar.generator import generate as generate
