#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>

#include "datastates/base/error.hpp"
#include "datastates/base/unmovable.hpp"
#include "datastates/checksum/digest.hpp"

/// The parts of the Python module. Each adds its classes and functions to it.
namespace datastates::python {

void bind_checksums(pybind11::module_& module);
void bind_descriptor(pybind11::module_& module);
void bind_plans(pybind11::module_& module);
void bind_executor(pybind11::module_& module);

/// Lets go of the GIL for a scope. If the interpreter ends meanwhile, taking it again ends the
/// thread, by an exception. It must pass, alone: py::gil_scoped_release would end the process.
class NoGil : Unmovable {
  public:
    NoGil() : state_(PyEval_SaveThread()) {}
    // NOLINTNEXTLINE(*-noexcept-destructor, *-exception-escape)
    ~NoGil() noexcept(false) { PyEval_RestoreThread(state_); }

  private:
    PyThreadState* state_;
};

/// The module with the errors of the package. It needs none of the package's other modules.
pybind11::module_ errors();
/// Raises CorruptError for a record whose bytes do not match their checksum.
[[noreturn]] void raise_corrupt(const Error& error, const pybind11::object& key);

/// Digest runs as columns. The arrays must outlive what is returned.
DigestRunsArrays runs_arrays(std::uint64_t digests, const pybind11::array& offset,
                             const pybind11::array& length, const pybind11::array& run_length,
                             const pybind11::array& after, const pybind11::array& step,
                             const pybind11::array& digest);

}  // namespace datastates::python
