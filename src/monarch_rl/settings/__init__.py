"""The range of each number that a user sets, declared beside the setting and checked when settings are made."""
