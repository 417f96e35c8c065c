"""Import paths of upstream's flash-dmattn: masks and padding."""
