"""Floor 3: who holds which page, the pools behind the pages, and the view through which models read and write them."""
