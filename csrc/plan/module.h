// Python bindings of the classes of csrc/plan/. csrc/module.cpp adds them.
#pragma once

#include <pybind11/pybind11.h>

namespace apex_mp::step {

void define_classes(pybind11::module_& module);

}  // namespace apex_mp::step
