"""Plan generators of other papers, and programs that solve small instances exactly."""
