"""Several instances with prefix caches behind one router (QUARTZ §5), in virtual time."""
