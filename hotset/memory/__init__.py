"""Floor 3: page allocation, the pools behind the pages, and the view through which models read and write rows."""
