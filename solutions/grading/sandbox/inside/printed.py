"""In the kernel: counts what is printed; a gigabyte ends a cell, and not the machine."""

import threading
from typing import Any


class PrintedTooMuch(BaseException):
    """Raised where more is printed than anybody reads."""


class Printed:
    """Counts what the kernel prints; over the limit the cell ends, and threads are not heard."""

    def __init__(self) -> None:
        self.count, self.limit = 0, 1 << 20
        self.too_much = PrintedTooMuch

    def count_on(self, stream: Any) -> None:
        """Set up on the class of the kernel's streams, before IPython wraps the streams."""
        write = stream.write

        def counted(own: Any, text: str) -> int | None:
            self.count += len(text)
            if self.count <= self.limit:
                return write(own, text)
            if threading.current_thread() is threading.main_thread():
                raise PrintedTooMuch(f"more than {self.limit} characters")
            return None

        stream.write = counted


PRINTED = Printed()
