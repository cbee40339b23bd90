"""Where tables live and how they are looked up, one module a placement."""
