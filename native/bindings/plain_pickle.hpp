#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace datastates::python {

/// How a tensor of one element type stands in `data.pkl`: all but its numbers.
struct ArrayFrame {
    std::string head;  // up to the storage record's name
    std::string tail;  // from behind requires_grad on
    std::uint64_t itemsize = 1;
    bool typed = true;  // the storage's length counts elements, else bytes
};

/// Rows of an index, one after the other, in columns.
struct ArrayRows {
    pybind11::list keys;
    pybind11::tuple kinds;   // names, by number
    pybind11::tuple dtypes;  // names, by number
    std::vector<ArrayFrame> frames;
    std::span<const std::uint8_t> kind;
    std::span<const std::uint8_t> dtype;
    std::span<const std::uint32_t> record;
    std::span<const std::uint64_t> record_nbytes;
    std::span<const std::uint64_t> offset;
    std::span<const std::uint8_t> ndim;
    std::span<const std::uint64_t> dims;
    std::span<const std::uint64_t> strides;
};

/// Reads the opcodes of an object that holds dicts, lists, tuples, plain values and arrays only,
/// and whose arrays are those of the rows, in their order and written exactly as they are to be.
/// Each is `reference(key, kind, dtype, shape, stride, requires_grad, parameter)`. Nothing that the
/// opcodes name is imported or called, and no number in them decides how much memory is asked for.
///
/// A tuple of the value; None when there is anything else in it, which another reader has to judge.
pybind11::object read_plain_pickle(const pybind11::bytes& opcodes, const ArrayRows& rows,
                                   const pybind11::object& reference,
                                   const pybind11::object& ordered_dict);

}  // namespace datastates::python
