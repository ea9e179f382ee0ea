"""Published figures, computed again: `kme-dist reproduce TABLE`.

configs/paper/TABLE.yaml   the published figures, and what is said of them
published.py               reads those files
folds.py                   the unit of work: a fold is plain data, and gives one figure
hnr.py, mnist.py, ...      the protocols: what a fold of each table computes
results.py                 finished folds on disk, cells, agreement
page.py                    the page: published and own figures side by side
run.py                     all of it, on workers or in one process; resumes
"""
