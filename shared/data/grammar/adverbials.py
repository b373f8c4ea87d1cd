"""Adverbials of time and cause by the tense that they go with, and the prepositions of place."""

from shared.data.grammar.words import Adverb, tags

ADVERBS: dict[str, tuple[Adverb, ...]] = {
    "habit": (
        Adverb("every day", "jeden Tag"),
        Adverb("every morning", "jeden Morgen"),
        Adverb("every evening", "jeden Abend"),
        Adverb("on Sundays", "sonntags"),
        Adverb("often", "oft", "mid", "late", fronts=False),
        Adverb("always", "immer", "mid", "late", fronts=False),
        Adverb("sometimes", "manchmal", "mid", "late", fronts=False),
        Adverb("never", "nie", "mid", "late", fronts=False),
    ),
    "progressive": (
        Adverb("now", "jetzt"),
        Adverb("right now", "gerade", fronts=False),
        Adverb("today", "heute"),
    ),
    "past": (
        Adverb("yesterday", "gestern"),
        Adverb("last week", "letzte Woche"),
        Adverb("last summer", "letzten Sommer"),
        Adverb("three days ago", "vor drei Tagen"),
        Adverb("a month ago", "vor einem Monat"),
        Adverb("on Monday", "am Montag"),
    ),
    "cause": (
        Adverb("because of the rain", "wegen des Regens", comma=True),
        Adverb("in spite of the bad weather", "trotz des schlechten Wetters", comma=True),
        Adverb("during the long night", "während der langen Nacht", comma=True),
        Adverb("during the cold winter", "während des kalten Winters", comma=True),
    ),
    "perfect": (
        Adverb("already", "schon", "mid", "late", fronts=False),
        Adverb("never", "noch nie", "mid", "late", fronts=False),
        Adverb("today", "heute"),
        Adverb("this morning", "heute Morgen"),
    ),
    "future": (
        Adverb("tomorrow", "morgen"),
        Adverb("soon", "bald"),
        Adverb("next week", "nächste Woche"),
        Adverb("on Monday", "am Montag"),
    ),
    "modal": (
        Adverb("today", "heute"),
        Adverb("tomorrow", "morgen"),
        Adverb("now", "jetzt"),
    ),
}

WHEN = Adverb("when", "wann")
WHY = Adverb("why", "warum")

# English for a place and for a direction, German, tags of the nouns. All of these prepositions
# govern the dative for a place and the accusative for a direction.
INSIDE = ("in", "into", "in", "indoors outdoors")
BUILDINGS = (
    ("behind", "behind", "hinter", "building"),
    ("in front of", "in front of", "vor", "building"),
    ("next to", "next to", "neben", "building"),
)
SURFACE = ("on", "on", "auf", "surface")
PLACES: dict[str, tuple[tuple[str, str, str, str], ...]] = {
    "go": (INSIDE, BUILDINGS[0]),
    "run": (INSIDE, BUILDINGS[0]),
    "come": (INSIDE,),
    "jump": (("", "onto", "auf", "top seat"), ("", "into", "in", "outdoors")),
    "put": (SURFACE, ("", "under", "unter", "legs"), ("", "next to", "neben", "seat")),
    "place": (
        ("", "on", "auf", "top"),
        ("", "next to", "neben", "surface"),
        ("", "in", "in", "indoors"),
    ),
    "hang": (("", "on", "an", "wall"),),
    "lie": (SURFACE, ("under", "", "unter", "legs"), ("next to", "", "neben", "seat"), INSIDE),
    "stand": (("on", "", "auf", "top"), ("next to", "", "neben", "surface"), INSIDE),
    "sit": (("on", "", "auf", "seat"), INSIDE, *BUILDINGS),
}
# Activities that one can say the place of, though they do not need it.
LOCATED = tags("sleep work sing dance play wait read write eat drink draw meet")
