"""From one machine to many: planning, rehearsal, jobs and the check of nodes."""
