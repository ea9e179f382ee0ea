"""Which rows a batch has, in three modes: a function of the seed and the number of the batch, on any worker."""

import numpy as np
from matplotlib import pyplot as plt

from kme_dist.data.plan import BatchPlan
from kme_dist.report.axes import PALETTE

ROWS, BATCH, CHUNK, SHOWN = 240, 24, 20, 5


def draw():
    figure, several = plt.subplots(1, 3, figsize=(6.6, 2.4), sharey=True)
    for axes, mode in zip(several, ("contiguous", "blocks", "rows"), strict=True):
        plan = BatchPlan(ranges=((0, ROWS),), batch_size=BATCH, seed=0, mode=mode, chunk_rows=CHUNK)
        for step in range(SHOWN):
            batch = plan.batch(step)
            if batch.rows is None:
                rows = np.concatenate([np.arange(start, stop) for start, stop in batch.spans])
            else:
                rows = batch.rows
            axes.plot(rows, np.full(len(rows), step), "|", color=PALETTE[step % len(PALETTE)], markersize=9)
        axes.set_title(mode, fontsize=9)
        axes.set_xlim(0, ROWS)
        axes.set_xticks(range(0, ROWS + 1, 4 * CHUNK))
        axes.set_xlabel("row")
    several[0].set_yticks(range(SHOWN))
    several[0].set_ylabel("batch")
    several[0].set_ylim(SHOWN - 0.5, -0.5)
    return figure
