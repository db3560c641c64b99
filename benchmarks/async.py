"""What balancing brings to asynchronous training, and how many updates its server makes.

Run: `python benchmarks/async.py [--quick | --smoke] [--json] [--choose] [--only PART] [--pair]
[--seeds N ...]`. `--quick` takes at most three minutes: levels 1 and 8, one seed, fewer samples, a
small server part; the bars are the same. `--pair` leaves all trainings out but uniform and
balanced, for more seeds in the same time. All takes about 35 minutes.

**Task.** Fashion-MNIST, a small convolutional network (0.1 million parameters), SGD. The learning
rate falls to zero along a cosine over all samples: with a constant one the accuracy of the same
training scattered by three points from run to run, more than what is compared. Learning rate and
momentum are chosen by `--choose` at heterogeneity level 1 alone, uniform, with seeds of its own, by
accuracy after all samples: the best of those rates at which twice the rate learns, too, with every
seed. A training is one pass over as many samples as are chosen by its seed, the same ones in all
ways of training.

**Cluster.** Four workers under CPU quotas in the core ratios of OmniLearn's heterogeneity levels 1,
2, 4 and 8 for asynchronous training, scaled to 1.35 cores in all, one torch thread each, and a
server without a quota, in `poise.lab`. The same five processes make all trainings; quotas hold
from when all of them are ready.

**Trainings.** uniform: asynchronous, equal local batches. balanced: asynchronous, policy auto, the
rate of a push by its share alone. damped: the same, the rate also by staleness. stale 4:
stale-synchronous, auto, workers at most four steps apart. sync: synchronous, auto, no server. Those
of one seed and level follow each other in random order and do not take turns: an iteration that was
stopped half-way would be measured as a slow one. So accuracies can be compared, and times only as
far as the machine's own speed stays; they have no bar.

**Figures.** Accuracy: after all samples, of weights that were kept and tested later. Balanced -
uniform: lower end of the 95 % bootstrap interval of the median over seeds, not below seed noise,
the spread of uniform over seeds or half a point if that is more; one seed shows no spread, so that
a quick run can miss this by chance. Cost of heterogeneity: uniform at level 1 minus uniform at
level 8, seed by seed; if its median is above one point and its interval excludes 0, the part of it
that balanced has back at level 8; if not, there is nothing to recover and staleness decides.
Staleness: updates missed by a worker's gradient, its mean over the server's own counts of the last
two thirds of a training, over seeds; with equal iteration times all workers have n - 1 = 3. Time to
the target: from when all workers are throttled and may begin, without tests, on a line between
tests.

**Server.** Workers that push random gradients as fast as they can and compute nothing, all on this
machine: updates/s, the part of the time in which the server holds the weights, and the CPU that it
uses, over some seconds. Limit: updates/s at which it would hold the weights all the time, or use
all cores. Enough: so many workers, after which more raise the rate by less than a tenth.
"""

import sys

if __name__ == "__main__":
    from asynchronous_report import main  # not above: forked workers import this file, too

    sys.exit(main(__doc__.splitlines()[0]))
