"""What SLURM remembers of a job's earlier lives, for a node that sees nothing of them in the run folder.

The batch script adds it to the job's comment, behind the user's own, which stays there while the job waits and lives
again: `allattn: begun` in its first life, and later which nodes did not see the run folder. Such a node would begin
anew on a disk of its own.
"""

BEGUN = "allattn: begun"
UNSEEN = "allattn: unseen on"


def begun(comment: str) -> bool:
    """Whether a life of the job has begun."""
    return BEGUN in comment


def tries(comment: str) -> int:
    """How many nodes were left out since they did not see the run folder."""
    return comment.count(UNSEEN)
