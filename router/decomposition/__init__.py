"""From a request to a plan of subtasks, and from their answers to one."""
