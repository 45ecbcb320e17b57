#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace datastates::python {

/// The constant opcodes of a tensor of one element type in `data.pkl`.
struct ArrayFrame {
    std::string head;  // up to the storage record's name
    std::string tail;  // what follows requires_grad
    std::uint64_t itemsize = 1;
    bool typed = true;  // the storage's length is in elements, else in bytes
};

/// The arrays of an index in order, as columns.
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

/// Reads the pickle opcodes of an object that holds only dicts, lists, tuples, plain values and
/// arrays. The arrays must be those of the rows, in their order, and pickled exactly as our writer
/// does. Each array becomes `reference(key, kind, dtype, shape, stride, requires_grad, parameter)`.
/// The opcodes cannot import or call anything, and no number in them decides how much memory is
/// allocated.
///
/// Returns a tuple of the value, or None when the opcodes hold anything else; another reader then
/// has to read them. Throws Error "invalid" for rows whose columns contradict each other. Needs the
/// GIL.
pybind11::object read_plain_pickle(const pybind11::bytes& opcodes, const ArrayRows& rows,
                                   const pybind11::object& reference,
                                   const pybind11::object& ordered_dict);

}  // namespace datastates::python
