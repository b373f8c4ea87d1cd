"""Numbers, prices and times of day in words."""

_EN_WORDS = """zero one two three four five six seven eight nine ten eleven twelve thirteen
fourteen fifteen sixteen seventeen eighteen nineteen"""
_EN_TENS_WORDS = "zero ten twenty thirty forty fifty sixty seventy eighty ninety"
_DE_WORDS = """null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn
vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn"""
_DE_TENS_WORDS = "null zehn zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig"
_EN, _EN_TENS = tuple(_EN_WORDS.split()), tuple(_EN_TENS_WORDS.split())
_DE, _DE_TENS = tuple(_DE_WORDS.split()), tuple(_DE_TENS_WORDS.split())


def _require(number: int) -> None:
    if not 1 <= number <= 999:
        raise ValueError(f"numbers from 1 to 999 have words here, got {number}")


def english_number(number: int) -> str:
    """The number in words: 231 is `two hundred and thirty-one`. ValueError outside 1..999."""
    _require(number)
    hundreds, rest = divmod(number, 100)
    parts = [f"{_EN[hundreds]} hundred"] if hundreds else []
    if rest:
        tens, units = divmod(rest, 10)
        small = _EN[rest] if rest < 20 else _EN_TENS[tens] + (f"-{_EN[units]}" if units else "")
        parts.append(small)
    return " and ".join(parts)


def german_number(number: int) -> str:
    """The number in words: 231 is `zweihunderteinunddreißig`. ValueError outside 1..999."""
    _require(number)
    hundreds, rest = divmod(number, 100)
    head = "" if not hundreds else ("" if hundreds == 1 else _DE[hundreds]) + "hundert"
    if not rest:
        return head
    tens, units = divmod(rest, 10)
    if rest < 20:
        return head + _DE[rest]
    unit = "ein" if units == 1 else _DE[units]
    return head + (f"{unit}und" if units else "") + _DE_TENS[tens]


def english_time(hour: int, quarter: int) -> str:
    """The time `quarter` quarters after the hour (1 to 12): (7, 2) is `half past seven`."""
    following = _EN[hour % 12 + 1]
    return (
        f"{_EN[hour]} o'clock",
        f"a quarter past {_EN[hour]}",
        f"half past {_EN[hour]}",
        f"a quarter to {following}",
    )[quarter]


def german_time(hour: int, quarter: int) -> str:
    """The same time in German, which counts the half hour towards the next: `halb acht`."""
    following = _DE[hour % 12 + 1]
    return (
        f"{'ein' if hour == 1 else _DE[hour]} Uhr",
        f"Viertel nach {_DE[hour]}",
        f"halb {following}",
        f"Viertel vor {following}",
    )[quarter]
