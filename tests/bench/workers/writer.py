"""Prints numbered lines, all at once or at a rate: writer.py LINES LINES_PER_SECOND (0: as fast as it can)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

lines, rate = int(sys.argv[1]), float(sys.argv[2])
rank = os.environ["RANK"]
began = time.perf_counter()
for number in range(lines):
    if rate:
        time.sleep(max(0.0, began + number / rate - time.perf_counter()))
    print(
        f"rank {rank} line {number:07d} loss 3.14159 tokens/s 12345.6 lr 3e-4 and as much text as a log line has",
        flush=True,
    )
Path(os.environ["BENCH_FOLDER"], f"seconds-{rank}").write_text(str(time.perf_counter() - began))
