/* black_box.h: the black box's functions of _core. */
#ifndef ESPER_PYTHON_BLACK_BOX_H
#define ESPER_PYTHON_BLACK_BOX_H

#include <Python.h>

extern PyMethodDef esper_py_black_box_methods[];

#endif
