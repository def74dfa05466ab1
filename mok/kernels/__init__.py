"""Device code: tile bodies, the loop that walks the task table, and the planner's kernels. Nothing here launches anything."""
