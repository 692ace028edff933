"""The command line: `lowp demo`, `lowp bench`, `lowp info`. The library itself never imports it."""
