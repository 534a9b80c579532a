"""Codes of every entry of a bucket: a method is a pair of functions, encode and decode. Both transports are here."""
