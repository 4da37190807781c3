"""What SLURM remembers of a job's earlier lives, for a node that sees nothing of them in the run folder.

The batch script adds it to the job's comment, behind the user's own, which stays there while the job waits and lives
again: before it first trains, on which node it runs (`allattn: begun on n1`), and later which nodes did not see the run
folder (`allattn: unseen on n4`). Such a node would begin anew on a disk of its own.
"""

import re

UNSEEN = "allattn: unseen on"


def begun_on(comment: str) -> str | None:
    """The node of the batch script in the life that was the first to train; None before that."""
    found = re.search(r"allattn: begun on ([^\s;]+)", comment)
    return found[1] if found else None


def tries(comment: str) -> int:
    """How many nodes were left out since they did not see the run folder."""
    return comment.count(UNSEEN)
